"""How a block is cut into shards and tensors."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from kvdepot.errors import ConfigError

SHARDS_MAX = 4096
TENSORS_MAX = 65_536
BLOCK_BYTES_MAX = 1 << 30


@dataclass(frozen=True)
class BlockLayout:
    """Layout of a block: shards, each made of tensors.

    A shard is a part of a block that moves as one: the whole block, or a layer when layers move one by one. A block has
    at most 4096 shards and 65,536 tensors.

    ``BlockLayout(shards, tensor_sizes_bytes)`` makes a layout of equal shards, from their number and the sizes of one
    shard's tensors in order. ``of_shards`` makes one of shards that differ.

    Attributes:
        runs: the shards in order, as runs of equal ones: their number, and the sizes of the tensors of one.

    Raises:
        ConfigError: no shard or tensor, too many, an empty tensor, or a block of more than 1 GiB.
    """

    runs: tuple[tuple[int, tuple[int, ...]], ...]

    def __init__(self, shards: int, tensor_sizes_bytes: Iterable[int]) -> None:
        self._set([(int(shards), tuple(map(int, tensor_sizes_bytes)))])

    @staticmethod
    def of_shards(shards: Iterable[Iterable[int]]) -> "BlockLayout":
        """Returns the layout of a block with these shards, each given by its tensors' sizes in bytes, in order.

        Raises:
            ConfigError: as for ``BlockLayout``.
        """
        sizes = [tuple(map(int, shard)) for shard in shards]
        layout = object.__new__(BlockLayout)
        layout._set([(len(list(run)), shard) for shard, run in groupby(sizes)])
        return layout

    def _set(self, runs: list[tuple[int, tuple[int, ...]]]) -> None:
        object.__setattr__(self, "runs", tuple(runs))
        if not 1 <= self.shards <= SHARDS_MAX:
            raise ConfigError(f"layout: a block has 1 to {SHARDS_MAX} shards, got {self.shards}")
        tensors = sum(count * len(sizes) for count, sizes in runs)
        if not all(sizes for _, sizes in runs) or tensors > TENSORS_MAX:
            raise ConfigError(f"layout: a block has 1 to {TENSORS_MAX} tensors, got {tensors}")
        for _, sizes in runs:
            if min(sizes) < 1:
                raise ConfigError(f"layout: every tensor has at least one byte, got tensor_sizes_bytes={sizes}")
        if self.block_bytes > BLOCK_BYTES_MAX:
            raise ConfigError(f"layout: a block has at most {BLOCK_BYTES_MAX} bytes, got {self.block_bytes}")

    @property
    def shards(self) -> int:
        """Number of shards of a block."""
        return sum(count for count, _ in self.runs)

    @property
    def tensor_sizes_bytes(self) -> tuple[int, ...]:
        """Sizes of the tensors of every shard, in order.

        Raises:
            ConfigError: the shards differ: see ``runs``.
        """
        if len(self.runs) > 1:
            raise ConfigError("layout: the shards of this block differ: use its runs")
        return self.runs[0][1]

    @property
    def shard_bytes(self) -> int:
        """Bytes of every shard.

        Raises:
            ConfigError: the shards differ: see ``runs``.
        """
        return sum(self.tensor_sizes_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all shards together."""
        return sum(count * sum(sizes) for count, sizes in self.runs)

    def by_shard(self) -> Iterator[tuple[int, ...]]:
        """Yields for each shard the sizes of its tensors in bytes."""
        for count, sizes in self.runs:
            for _ in range(count):
                yield sizes

    def to_json(self) -> str:
        """Returns the layout as the core and a namespace's description spell it: ``[[shards,[sizes…]]…]``."""
        return json.dumps([[count, list(sizes)] for count, sizes in self.runs], separators=(",", ":"))

    @staticmethod
    def of(layout: "BlockLayout | Iterable[int]") -> "BlockLayout":
        """Returns ``layout`` itself, or a block of one shard made from tensor sizes in bytes.

        Raises:
            ConfigError: as for ``BlockLayout``, or it is neither.
        """
        if not isinstance(layout, BlockLayout | Iterable):
            raise ConfigError(
                f"layout: must be a BlockLayout, or a list of sizes in bytes, such as [2048]: got {layout!r}"
            )
        return layout if isinstance(layout, BlockLayout) else BlockLayout(1, layout)
