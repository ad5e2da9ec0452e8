"""Follows what a depot can serve: which blocks become readable in which place, and which stop being so."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from typing_extensions import Self

from kvdepot import _native
from kvdepot.errors import UnavailableError
from kvdepot.follower import Follower

ANSWER_MS = 5000
"""How long a depot that is needed may take to answer: its machine may be busy."""
ATTACH_MS = 1000
PAUSE_S = 0.05


@dataclass(frozen=True)
class BlockEvent:
    """Blocks of one namespace that became readable in one place, or stopped being so.

    Attributes:
        namespace: name of the namespace, 32 hex digits.
        place: ``pool``, or the name of a tier.
        stored: whether the blocks can be read there from now on; if not, they cannot any more.
        hashes: the blocks' hashes, 16 bytes each.
    """

    namespace: str
    place: str
    stored: bool
    hashes: tuple[bytes, ...]


class BlockEvents:
    """Follows all namespaces of the depot at a socket. Iterating yields events, the present content first.

    A block is reported as removed only if it was reported as stored before, so a consumer that applies all events knows
    what the depot has. If the depot ends, all of its blocks are reported as removed, and those of the next depot at the
    socket as stored.

    Thread safety: one thread at a time may iterate; any thread may call ``close``, which ends the iteration.
    """

    def __init__(self, socket: str, *, needs_depot: bool = True) -> None:
        """Begins to follow.

        Args:
            socket: path of the depot's Unix socket.
            needs_depot: whether a depot must answer now. If not, it is followed as soon as one answers.

        Raises:
            UnavailableError: no depot answers there within five seconds, and ``needs_depot`` is set.
            ProtocolError: another service, or another version of kvdepot, answers.
        """
        absent = UnavailableError(f"no depot answers on {socket}: `kvdepot depots` lists those that run")
        if needs_depot and not os.path.exists(socket):
            raise absent
        wait_ms = ANSWER_MS if needs_depot else ATTACH_MS
        self._depot = _native.Depot.connect(socket, None, wait_ms=wait_ms, call_timeout_ms=ATTACH_MS)
        if needs_depot and not self._depot.attached:
            self._depot.close()
            raise absent
        self._follower = Follower(self._depot.follow())
        self._closed = False

    @property
    def attached(self) -> bool:
        """Whether a depot answers."""
        return self._depot.attached

    @property
    def in_step(self) -> bool:
        """Whether everything that the depot had at the last look, normally within 50 ms, has been reported."""
        return self._follower.in_step

    def take(self, most: int = 1024) -> list[BlockEvent]:
        """Returns events about at most ``most`` blocks; empty if there is nothing new. Never waits."""
        changes = self._follower.take(most)
        if not changes:
            return []
        names = self._follower.namespace_ids
        return [BlockEvent(names[group], place, stored, tuple(hashes)) for group, place, stored, hashes in changes]

    def __iter__(self) -> Iterator[BlockEvent]:
        """Yields events until ``close``."""
        while not self._closed:
            if events := self.take():
                yield from events
            else:
                time.sleep(PAUSE_S)

    def content(self) -> Iterator[BlockEvent]:
        """Yields events until everything that the depot has is reported."""
        while not self._closed:
            in_step = self._follower.in_step
            if events := self.take():
                yield from events
            elif in_step:
                return
            else:
                time.sleep(PAUSE_S)

    def close(self) -> None:
        """Stops following. Idempotent."""
        self._closed = True
        self._follower.close()
        self._depot.close()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes it."""
        self.close()
