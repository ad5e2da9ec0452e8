"""What one request has asked the depot for, and what is known of it: no depot, no thread and no clock.

vLLM asks for one key at a time. The first question takes all keys of the request along that can be asked for next, so
that the depot is asked once, and not once a key.
"""

import enum
import threading
from collections.abc import Mapping, Sequence

STALE_S = 2.0
"""How long an answer holds for a request that still waits to be scheduled; then it is asked for again."""


class Verdict(enum.Enum):
    """What is known of a key."""

    UNASKED = enum.auto()
    WAITING = enum.auto()
    LATE = enum.auto()
    THERE = enum.auto()
    ABSENT = enum.auto()


class Batch:
    """Keys that are asked for together.

    Attributes:
        keys: all of them, each once.
        asked_s: when, by ``time.monotonic``.
        found: for each key whether the depot has it; ``None`` = no answer. Set before ``done``.
        done: set when nobody works on it any more.
    """

    def __init__(self, keys: Sequence[bytes], asked_s: float) -> None:
        self.keys = keys
        self.asked_s = asked_s
        self.found: Sequence[bool] | None = None
        self.done = threading.Event()

    def answer(self, found: Sequence[bool] | None) -> None:
        """Takes the answer, from any thread."""
        self.found = found
        self.done.set()


class Answers:
    """What is known of one request's keys. One thread uses it."""

    def __init__(self, late_s: float) -> None:
        """``late_s``: how long the request waits for an answer; then it is a miss."""
        self._late_s = late_s
        self._known: dict[bytes, bool] = {}
        self._asked: dict[bytes, Batch] = {}
        self._lost: set[bytes] = set()
        self._settled_s = 0.0
        self._begun = False

    def of(self, key: bytes, now_s: float) -> Verdict:
        """What is known of a key. ``LATE`` is said once of a batch; its keys are absent from then on."""
        if key in self._lost:
            return Verdict.ABSENT
        known = self._known.get(key)
        if known is not None and now_s - self._settled_s <= STALE_S:
            return Verdict.THERE if known else Verdict.ABSENT
        if known is not None:
            self.forget()
        batch = self._asked.get(key)
        if batch is None:
            return Verdict.UNASKED
        if batch.done.is_set():
            self._settle(batch, batch.found, now_s)
            return Verdict.THERE if self._known[key] else Verdict.ABSENT
        if now_s - batch.asked_s < self._late_s:
            return Verdict.WAITING
        self._settle(batch, None, now_s)
        return Verdict.LATE

    def ask(self, key: bytes, positions: Mapping[bytes, int], now_s: float) -> Batch:
        """The batch that is to be asked for, with a key that is ``UNASKED``.

        Args:
            key: what vLLM has asked for.
            positions: of the request's keys, where each ends; empty where vLLM does not tell.
            now_s: now, by ``time.monotonic``.
        """
        # Prefixes are looked up from here to the end. Windows are looked up from the end: that is a second question
        # in a model without full attention, which then takes all.
        begin = positions.get(key, 0) if not self._begun else 0
        rest = (one for one, end in positions.items() if end >= begin and one != key)
        keys = [key, *(one for one in rest if one not in self._asked and one not in self._known)]
        self._begun = True
        batch = Batch(keys, now_s)
        self._asked.update(dict.fromkeys(keys, batch))
        return batch

    def lost(self, keys: Sequence[bytes]) -> None:
        """These were there and could not be loaded: absent for this request, or it would try them for ever."""
        self._lost.update(keys)

    def forget(self) -> None:
        """Asks again for everything, except what was lost."""
        self._known.clear()
        self._asked.clear()
        self._begun = False

    def _settle(self, batch: Batch, found: Sequence[bool] | None, now_s: float) -> None:
        self._settled_s = now_s
        for number, key in enumerate(batch.keys):
            if self._asked.pop(key, None) is not None:
                self._known[key] = bool(found[number]) if found is not None else False
