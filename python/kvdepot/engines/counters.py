"""Counts of successes and failures by name, with rate-limited log lines."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

SAY_AGAIN_S = 60.0
"""Seconds until the log repeats one kind of failure."""


class Counters:
    """Counts of one adapter or backend. Any number of threads may use them concurrently."""

    def __init__(self, logger: Callable[[], logging.Logger]) -> None:
        """``logger`` is called when there is something to log."""
        self._logger = logger
        self._counts: Counter[str] = Counter()
        self._said_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        """Adds ``count``; does nothing for 0."""
        if count:
            with self._lock:
                self._counts[name] += count

    def trouble(self, name: str, message: str, count: int = 1) -> None:
        """Counts a failure that became a miss, and logs ``message`` unless the same name was logged recently."""
        if not count:
            return
        now_s = time.monotonic()
        with self._lock:
            self._counts[name] += count
            total = self._counts[name]
            say = now_s - self._said_s.get(name, -SAY_AGAIN_S) >= SAY_AGAIN_S
            if say:
                self._said_s[name] = now_s
        if say:
            self._logger().warning("kvdepot: %s (%s: %d so far)", message, name, total)

    def snapshot(self) -> dict[str, int]:
        """Returns all counts so far."""
        with self._lock:
            return dict(sorted(self._counts.items()))
