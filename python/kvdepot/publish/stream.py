"""The numbered batches of a publisher, and what it answers to a subscriber that missed some. Pure: no clock, no socket.

A run's first batch clears what its subscribers know of earlier runs, and its numbers are higher than theirs. The last
batches are kept. A request for older ones is answered with the contents as of the oldest batch that is kept, in batches
whose numbers end before it, so that all numbers of an answer are consecutive.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple, Protocol

from kvdepot.events import BlockEvent
from kvdepot.publish.contents import Change, Contents

BLOCKS_PER_EVENT = 2048
"""Maximum number of blocks in an event, and of events' blocks in a batch."""
BLOCKS_KEPT_MAX = 1 << 20
"""Maximum number of blocks in the batches that are kept."""
CONTENTS_S = 5.0
"""Seconds after which contents are encoded again for answers. That takes long, and anybody may ask."""
NUMBERS_PER_MS = 1 << 20
"""Numbers for each millisecond since 1970. A run of so many batches a millisecond would reach those of later runs."""
SNAPSHOT_NUMBERS = 1 << 19
"""Numbers below a run's first one, for contents."""


def first_sequence(unix_ms: int) -> int:
    """Returns the first number of a run that begins now; it fits into 63 bits until the year 2248."""
    return unix_ms * NUMBERS_PER_MS + SNAPSHOT_NUMBERS


class Batch(NamedTuple):
    """A message to subscribers: its number and its encoded events."""

    sequence: int
    payload: bytes


class Encoder(Protocol):
    """Encodes batches."""

    def encode(self, changes: Sequence[Change], clears: bool, now_s: float) -> bytes:
        """Returns a batch; if ``clears``, its first event says that all blocks are gone."""


@dataclass(slots=True)
class Kept:
    """A batch that is kept.

    Attributes:
        batch: the batch.
        changes: what it changed.
        blocks: number of blocks in its payload.
        repeats: whether it changed nothing, and belongs to the last repetition.
    """

    batch: Batch
    changes: tuple[Change, ...]
    blocks: int
    repeats: bool


class EventStream:
    """See the module. The caller sends the batches that its methods return, in this order."""

    def __init__(
        self, contents: Contents, encoder: Encoder, *, first: int, batches_kept: int = 10_000, clears: bool = True
    ) -> None:
        """Begins a run.

        Args:
            contents: what is published, empty yet.
            encoder: encodes batches.
            first: number of the first batch.
            batches_kept: maximum number of batches that are kept for subscribers that missed them, 1 or more.
            clears: whether ``AllBlocksCleared`` precedes contents. It clears all that a subscriber knows of the topic.
        """
        self.contents = contents
        self._encoder = encoder
        self._first = self._next = first
        self._batches_kept = batches_kept
        self._clears = clears
        self._kept: deque[Kept] = deque()
        self._blocks_kept = 0
        self._to_repeat: Iterator[list[Change]] | None = None
        self._snapshot: tuple[int, list[Batch]] = (0, [])
        self._encoded_s = -math.inf
        self.blocks_stored = 0
        self.blocks_removed = 0

    @property
    def next_sequence(self) -> int:
        """Number of the next batch."""
        return self._next

    @property
    def batches(self) -> int:
        """Number of batches so far."""
        return self._next - self._first

    def begin(self, now_s: float) -> list[Batch]:
        """Returns the run's first batch."""
        return [self._number([], now_s, clears=self._clears)]

    def add(self, events: Iterable[BlockEvent], now_s: float) -> list[Batch]:
        """Returns the batches that report events of the depot."""
        changes = [change for event in events if (change := self.contents.apply(event)) is not None]
        batches = []
        for piece in _pieces(changes):
            for change in piece:
                if change.is_stored:
                    self.blocks_stored += len(change.hashes)
                else:
                    self.blocks_removed += len(change.hashes)
            batches.append(self._number(piece, now_s))
        return batches

    @property
    def is_repeating(self) -> bool:
        """Whether a repetition has begun and has more batches."""
        return self._to_repeat is not None

    def repeat(self, most: int, now_s: float) -> list[Batch]:
        """Returns the next batches of a repetition, at most ``most``, and begins one if there is none.

        A repetition reports the whole contents again, for subscribers that cannot ask for what they missed. Changes may
        be reported between its batches, but not before its first batch, which clears, once the contents are taken.
        """
        if self._to_repeat is None:
            self._to_repeat = self._begin_repeat(now_s)
        batches = []
        for piece in islice(self._to_repeat, most):
            there = [still for change in piece if (still := self.contents.still(change)).hashes]
            batches.append(self._number(there, now_s, clears=not piece, repeats=True))
        if len(batches) < most:
            self._to_repeat = None
        return batches

    def end(self, now_s: float) -> list[Batch]:
        """Returns the batches after which nothing of this publisher is known: nobody keeps it up to date."""
        if self._clears:
            return [self._number([], now_s, clears=True)]
        gone = [change._replace(is_stored=False) for change in self.contents.present()]
        return [self._number(piece, now_s) for piece in _pieces(gone)]

    def admits(self, start: int, now_s: float) -> bool:
        """Returns whether a request may be answered now. If so, ``replay`` must follow.

        Contents are encoded at most every ``CONTENTS_S``. Requests that need them wait, and share them.

        Args:
            start: number of the first batch that the request asks for.
            now_s: a monotonic time.
        """
        if self._has_answer(start):
            return True
        if now_s - self._encoded_s < CONTENTS_S:
            return False
        self._encoded_s = now_s
        return True

    def replay(self, start: int, now_s: float) -> list[Batch]:
        """Returns what a subscriber needs that has all batches before ``start``; empty if it has missed nothing."""
        if start >= self._next or not self._kept:
            return []
        batches = [kept.batch for kept in self._kept if kept.batch.sequence >= start]
        if not self._needs_contents(start):
            return batches
        if not self._has_answer(start):
            self._encode_contents(self._oldest - start, now_s)
        return self._snapshot[1] + batches

    def _begin_repeat(self, now_s: float) -> Iterator[list[Change]]:
        """Returns the contents in pieces, after an empty one for the batch that clears."""
        # What an earlier repetition reported is reported again now. Its numbers stay: those of an answer are in a row.
        nothing = self._encoder.encode([], False, now_s)
        for kept in self._kept:
            if kept.repeats:
                self._blocks_kept -= kept.blocks
                kept.batch, kept.blocks, kept.repeats = kept.batch._replace(payload=nothing), 0, False
        clear: list[list[Change]] = [[]] if self._clears else []
        return chain(clear, _pieces(list(self.contents.present())))

    @property
    def _oldest(self) -> int:
        """Number of the oldest batch that is kept, or of the next one."""
        return self._kept[0].batch.sequence if self._kept else self._next

    def _needs_contents(self, start: int) -> bool:
        return start < self._oldest and self._oldest > self._first

    def _has_answer(self, start: int) -> bool:
        """Returns whether nothing has to be encoded for an answer."""
        if not self._needs_contents(start):
            return True
        known, batches = self._snapshot
        return known == self._oldest and len(batches) <= self._oldest - start

    def _encode_contents(self, room: int, now_s: float) -> None:
        """Encodes the contents before the oldest batch in at most ``room`` batches, whose numbers end before it."""
        pieces: list[list[Change]] = list(_pieces(self._contents_before())) or [[]]
        if len(pieces) > room:
            each = -(-len(pieces) // room)
            pieces = [list(chain.from_iterable(pieces[at : at + each])) for at in range(0, len(pieces), each)]
        first = self._oldest - len(pieces)
        batches = [
            Batch(first + at, self._encoder.encode(piece, self._clears and not at, now_s))
            for at, piece in enumerate(pieces)
        ]
        self._snapshot = (self._oldest, batches)

    def _contents_before(self) -> Iterator[Change]:
        """Yields the contents before the oldest batch that is kept.

        Each change was one: a block whose first change since then is that it was stored was not there before, and one
        that was removed was.
        """
        first: dict[tuple[int, str], dict[bytes, bool]] = {}
        for kept in self._kept:
            for group, place, is_stored, hashes in kept.changes:
                seen = first.setdefault((group, place), {})
                for one in hashes:
                    seen.setdefault(one, is_stored)
        for change in self.contents.present():
            seen = first.get((change.group, change.place), {})
            before = tuple(one for one in change.hashes if one not in seen) if seen else change.hashes
            if before:
                yield change._replace(hashes=before)
        for (group, place), seen in first.items():
            if removed := tuple(one for one, is_stored in seen.items() if not is_stored):
                yield Change(group, place, True, removed)

    def _number(self, piece: list[Change], now_s: float, *, clears: bool = False, repeats: bool = False) -> Batch:
        """Gives a batch the next number and keeps it."""
        batch = Batch(self._next, self._encoder.encode(piece, clears, now_s))
        self._next += 1
        kept = Kept(batch, () if repeats else tuple(piece), sum(len(change.hashes) for change in piece), repeats)
        self._kept.append(kept)
        self._blocks_kept += kept.blocks
        while len(self._kept) > self._batches_kept or (self._blocks_kept > BLOCKS_KEPT_MAX and len(self._kept) > 1):
            self._blocks_kept -= self._kept.popleft().blocks
            self._snapshot = (0, [])
        return batch


def _pieces(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """Yields the changes in order, in lists of at most ``BLOCKS_PER_EVENT`` blocks."""
    piece: list[Change] = []
    room = BLOCKS_PER_EVENT
    for change in changes:
        at = 0
        while at < len(change.hashes):
            some = change.hashes[at : at + room]
            piece.append(change._replace(hashes=some))
            at += len(some)
            room -= len(some)
            if not room:
                yield piece
                piece, room = [], BLOCKS_PER_EVENT
    if piece:
        yield piece
