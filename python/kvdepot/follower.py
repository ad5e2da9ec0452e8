"""Follows which blocks become readable in which place, and which stop being so: what ``Depot.follow`` returns."""

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from typing_extensions import Self

from kvdepot import _native
from kvdepot.claim import native_namespaces
from kvdepot.namespace import Namespace
from kvdepot.store import Store


class Change(NamedTuple):
    """Blocks of one group that became readable in one place, or stopped being so.

    Attributes:
        group: position among the groups that are followed.
        place: ``pool``, or the name of a tier.
        stored: whether the blocks can be read there from now on; if not, they cannot any more.
        hashes: the blocks' hashes, 16 bytes each.
    """

    group: int
    place: str
    stored: bool
    hashes: list[bytes]


class Follower:
    """Follows a depot's events on a thread of the core: the present content first, then changes.

    It keeps in step over lost events, resets and restarts of the depot. It tracks at most 4 Mi blocks, about 32 bytes
    each, and leaves out the others. Only blocks that were reported as stored are reported as removed. Use it as a
    context manager, or close it.

    Thread safety: one thread at a time may take changes; any thread may call ``close``.
    """

    def __init__(self, native: _native.Follower) -> None:
        self._native = native

    def take(self, most: int = 1024) -> list[Change]:
        """Returns the oldest changes, of at most ``most`` blocks; empty if there is nothing new. Never waits.

        While 65,536 changes wait here, nothing more is read.
        """
        changes = self._native.take(most)
        if not changes:
            return []
        places = self._native.places
        return [
            Change(group, places[place] if place < len(places) else f"tier {place}", stored, hashes)
            for group, place, stored, hashes in changes
        ]

    def follow(self, groups: Sequence[Sequence[Store | Namespace]]) -> None:
        """Follows other groups. All blocks that were reported as stored are reported as removed first.

        Raises:
            UnavailableError: a store is closed.
        """
        self._native.follow([native_namespaces(group) for group in groups])

    @property
    def namespace_ids(self) -> list[str]:
        """If every namespace of the depot is followed: the group's namespace, by position. Otherwise empty."""
        return self._native.namespaces

    @property
    def in_step(self) -> bool:
        """Whether everything that the depot had at the last look, normally within 50 ms, was taken."""
        return self._native.in_step

    def close(self) -> None:
        """Ends the thread. Idempotent. Also happens when this object is garbage-collected, or the depot is closed."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
