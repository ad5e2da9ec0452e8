"""Which resets the depot still has to confirm, and which stores came too late for one."""

import math
import threading
from collections import Counter

AGAIN_S = 0.5
"""Seconds until an unconfirmed reset is tried again."""


class Resets:
    """Tracks clears, so that nothing from before a clear is found after it.

    A clear or flush begins a generation. A store belongs to the generation in which the engine submitted it. A store of
    an older generation does not begin; one that was in flight may end after it, so the depot is then reset once more.
    Until no such store is left and every reset is confirmed, nothing is settled.

    Any number of threads may use it concurrently.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = 0
        self._late = 0
        self._under_way: Counter[int] = Counter()
        self._asked = 0
        self._confirmed = 0
        self._tried_s = -math.inf

    @property
    def generation(self) -> int:
        """Number of clears and flushes so far."""
        return self._generation

    @property
    def settled(self) -> bool:
        """Whether the depot has only blocks that were stored since the last clear."""
        with self._lock:
            late = any(generation < self._late for generation in self._under_way)
            return self._confirmed == self._asked and not late

    def clear(self) -> None:
        """Begins a generation and requests a reset."""
        with self._lock:
            self._generation += 1
            self._late = self._generation
            self._ask()

    def flush(self) -> None:
        """Begins a generation without a reset: what is stored stays valid, but the memory of stores is reused."""
        with self._lock:
            self._generation += 1

    def reuse(self) -> None:
        """Notes that the memory of stores from before the last flush is reused: those still in flight are late."""
        with self._lock:
            self._late = self._generation

    def attempt(self, now_s: float) -> int | None:
        """Returns the number of a reset to send now; ``None`` if all are confirmed, or one was sent recently."""
        with self._lock:
            if self._confirmed == self._asked or now_s - self._tried_s < AGAIN_S:
                return None
            self._tried_s = now_s
            return self._asked

    def confirm(self, number: int) -> None:
        """Marks a reset and all earlier ones as confirmed. Later ones stay due."""
        with self._lock:
            self._confirmed = max(self._confirmed, number)

    def begin(self, generation: int) -> bool:
        """Returns whether a store of that generation may begin; if so, ``end`` must follow."""
        with self._lock:
            if generation != self._generation:
                return False
            self._under_way[generation] += 1
            return True

    def end(self, generation: int) -> bool:
        """Ends a store. If it belongs to an older generation, returns false and requests another reset."""
        with self._lock:
            self._under_way[generation] -= 1
            if not self._under_way[generation]:
                del self._under_way[generation]
            if generation >= self._late:
                return True
            self._ask()
            return False

    def _ask(self) -> None:
        self._asked += 1
        self._tried_s = -math.inf
