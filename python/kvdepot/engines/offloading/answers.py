"""The lookups of one request and their answers: a state machine without depot, thread or clock.

vLLM asks for one key at a time. The first question of a request covers all keys that may follow, so the depot gets one
lookup per request instead of one per key.
"""

import enum
import threading
from collections.abc import Mapping, Sequence

STALE_S = 2.0
"""How long an answer is valid while its request waits to be scheduled; after that it is asked for again."""


class Verdict(enum.Enum):
    """What is known of a key."""

    UNASKED = enum.auto()
    WAITING = enum.auto()
    LATE = enum.auto()
    THERE = enum.auto()
    ABSENT = enum.auto()


class Batch:
    """Keys of one question.

    Attributes:
        keys: all of them, each once.
        asked_s: time of the question, by ``time.monotonic``.
        found: whether the depot has each key; ``None`` = no answer. Set before ``done``.
        done: set when the answer is final.
    """

    def __init__(self, keys: Sequence[bytes], asked_s: float) -> None:
        self.keys = keys
        self.asked_s = asked_s
        self.found: Sequence[bool] | None = None
        self.done = threading.Event()

    def answer(self, found: Sequence[bool] | None) -> None:
        """Sets the answer. Any thread may call this."""
        self.found = found
        self.done.set()


class Answers:
    """What is known about one request's keys. Not thread-safe."""

    def __init__(self, late_s: float, hits_max: int) -> None:
        """Creates the answers of a request that has asked nothing.

        Args:
            late_s: seconds that the request waits for an answer before it counts as a miss.
            hits_max: maximum number of keys answered with ``THERE``: the number of chunks in vLLM's memory. Each one
                is loaded into that memory, so one more would evict a chunk of the same request.
        """
        self._late_s = late_s
        self._hits_max = hits_max
        self._hits: set[bytes] = set()
        self._known: dict[bytes, bool] = {}
        self._asked: dict[bytes, Batch] = {}
        self._lost: set[bytes] = set()
        self._over: set[bytes] = set()
        self._promised: set[bytes] = set()
        self._settled_s = 0.0
        self._begun = False

    def of(self, key: bytes, now_s: float) -> Verdict:
        """Returns what is known about a key.

        ``LATE`` is returned once per batch. After that its keys are absent until ``restart``. Otherwise a request that
        waits to be scheduled would wait again and again for a depot that hangs.
        """
        if key in self._lost or key in self._over:
            return Verdict.ABSENT
        known = self._known.get(key)
        if known is not None and now_s - self._settled_s <= STALE_S:
            return self._hit(key) if known else Verdict.ABSENT
        if known is not None:
            self.forget()
        batch = self._asked.get(key)
        if batch is None:
            return Verdict.UNASKED
        if batch.done.is_set():
            self._settle(batch, batch.found, now_s)
            return self._hit(key) if self._known[key] else Verdict.ABSENT
        if now_s - batch.asked_s < self._late_s:
            return Verdict.WAITING
        self._settle(batch, None, now_s)
        self._over.update(batch.keys)
        return Verdict.LATE

    def ask(self, key: bytes, positions: Mapping[bytes, int], now_s: float) -> Batch:
        """Returns the batch to ask for, given a key that is ``UNASKED``.

        Args:
            key: the key that vLLM asks for.
            positions: the request's keys with the token where each ends; empty if vLLM does not provide them.
            now_s: current time, by ``time.monotonic``.
        """
        # vLLM looks up a prefix from this key to the end, but a window from its end. So a request of a model without
        # full attention asks twice: the second batch covers all other keys.
        begin = positions.get(key, 0) if not self._begun else 0
        rest = (one for one, end in positions.items() if end >= begin and one != key)
        keys = [key, *(one for one in rest if one not in self._asked and one not in self._known)]
        self._begun = True
        batch = Batch(keys, now_s)
        self._asked.update(dict.fromkeys(keys, batch))
        return batch

    def lost(self, keys: Sequence[bytes]) -> None:
        """Marks keys that failed to load as absent for this request. Otherwise it would retry them forever."""
        self._lost.update(keys)

    @property
    def promised(self) -> bool:
        """Whether a key was ``THERE`` since the last ``step_over``, so that vLLM may have evicted a chunk for it."""
        return bool(self._promised)

    def accepted(self, keys: Sequence[bytes]) -> None:
        """Marks keys that vLLM has made room for and is loading."""
        self._promised.difference_update(keys)

    def step_over(self) -> None:
        """Marks keys that were ``THERE`` in this step but are not being loaded: vLLM had no room for them.

        They are absent until ``restart``. Otherwise vLLM would make room for them in the next step by evicting chunks
        from the beginning of the same request, and the rest would be useless.
        """
        self._over |= self._promised
        self._hits -= self._promised
        self._promised.clear()

    def loaded(self, keys: Sequence[bytes]) -> None:
        """Marks keys that were loaded for this request. If it asks for one again, vLLM has evicted the chunk.

        Such a key is absent. Otherwise two requests could evict each other's chunks and load them forever.
        """
        self._over.update(keys)

    def restart(self) -> None:
        """Drops all answers and the count of hits, except for lost keys: a preempted request is looked up again."""
        self.forget()
        self._hits.clear()
        self._over.clear()
        self._promised.clear()

    def forget(self) -> None:
        """Drops all answers, except for keys that stay absent."""
        self._known.clear()
        self._asked.clear()
        self._begun = False

    def _hit(self, key: bytes) -> Verdict:
        if key not in self._hits:
            if len(self._hits) >= self._hits_max:
                return Verdict.ABSENT
            self._hits.add(key)
        self._promised.add(key)
        return Verdict.THERE

    def _settle(self, batch: Batch, found: Sequence[bool] | None, now_s: float) -> None:
        self._settled_s = now_s
        for number, key in enumerate(batch.keys):
            if self._asked.pop(key, None) is not None:
                self._known[key] = bool(found[number]) if found is not None else False
