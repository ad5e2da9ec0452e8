"""What lies on media of the ``Slab`` and ``Dax`` tiers, read without a depot, and also while one uses them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdepot import _native
from kvdepot.stored.verify import Finding, Pace

STEP_BYTES = 4 << 20
"""Bytes read between two looks at the rate limit."""


@dataclass(frozen=True)
class MediumNamespace:
    """A namespace as a medium knows it: without its facts.

    Attributes:
        path: the medium.
        root: the namespace's name, 32 hex digits.
        epoch: the current one.
        blocks: number of its blocks.
        bytes: their length on the medium.
        problem: why the next start of a depot drops its blocks; empty if it does not.
    """

    path: Path
    root: str
    epoch: int
    blocks: int
    bytes: int
    problem: str


@dataclass(frozen=True)
class MediumBlock:
    """A block as a medium lists it.

    Attributes:
        path: the medium.
        offset_bytes: where the block lies there.
        hash: the block's hash, 32 hex digits.
        bytes: its length on the medium.
        order: grows with every block that is written to the medium.
    """

    path: Path
    offset_bytes: int
    hash: str
    bytes: int
    order: int


class Medium:
    """The content of a medium when it was opened. Nothing on it is changed.

    Args:
        path: the file or device.

    Raises:
        KVDepotError: it cannot be read, or is no medium of a Slab or Dax tier.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _native.MediumReader(path)
        self.tier = self._reader.tier
        self.problem = self._reader.problem or ""
        self.namespaces = tuple(
            MediumNamespace(path, root, epoch, blocks, total, problem or "")
            for root, epoch, blocks, total, problem in self._reader.namespaces()
        )

    def namespace(self, root: str) -> MediumNamespace | None:
        """Returns the namespace with this name, if the medium knows it."""
        return next((one for one in self.namespaces if one.root == root), None)

    def blocks(self, root: str) -> Iterator[MediumBlock]:
        """Yields the blocks of a namespace in the order of their places."""
        start: int | None = 0
        while start is not None:
            rows, start = self._reader.blocks(root, start=start)
            for block_hash, offset, count, order in rows:
                yield MediumBlock(self.path, offset, block_hash, count, order)

    def verify(
        self, root: str | None = None, *, pace: Pace, checked: Callable[[int, int], object]
    ) -> Iterator[Finding]:
        """Reads all blocks, or those of one namespace, and compares their checksums.

        Args:
            root: name of the namespace; ``None`` = all.
            pace: rate limit.
            checked: called with numbers of checked blocks, and their bytes.

        Yields:
            The broken blocks, except those that a depot drops or overwrites in the meantime.

        Raises:
            KVDepotError: the medium cannot be read any more.
        """
        check = self._reader.check(root)
        while (step := check.next(STEP_BYTES)) is not None:
            blocks, count, read, broken = step
            for namespace, block_hash, offset, reason in broken:
                yield Finding(self.path, namespace or "", reason, "kept", block_hash or "", offset)
            checked(blocks, count)
            pace.read(read)
