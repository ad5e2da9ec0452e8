"""Work that LMCache's server submits and asks for later, with an event descriptor that tells when to ask."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from kvdepot.engines.lmcache.counters import Counters

Result = TypeVar("Result")

WAITING_MAX = 1024
"""More tasks of one kind than this are not begun."""
RESULTS_MAX = 16 * WAITING_MAX
"""So many results wait to be taken. LMCache never asks for those of a prefetch that it gave up."""


class Tasks(Generic[Result]):
    """Tasks of one kind, each with a result that is taken once. Every task ends, also one submitted after ``close``.

    When too many results wait, the one that has waited longest is forgotten.

    Any number of threads may use them at once.
    """

    def __init__(self, kind: str, threads: int, counters: Counters) -> None:
        self._kind = kind
        self._counters = counters
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"kvdepot-{kind}")
        self._lock = threading.Lock()
        self._next = 0
        self._waiting = 0
        self._results: dict[int, Result] = {}
        self._closed = False

    def fileno(self) -> int:
        """The event descriptor; valid until ``close``."""
        return self._event_fd

    def submit(self, work: Callable[[], Result], failed: Callable[[], Result]) -> int:
        """Begins ``work`` and returns its number; ``failed`` makes the result of work that cannot be done."""
        with self._lock:
            number = self._next
            self._next += 1
            fits = self._waiting < WAITING_MAX and not self._closed and self._begin(number, work, failed)
            self._waiting += fits
        if not fits:
            self._counters.trouble(f"{self._kind}_not_begun", f"a {self._kind} was not begun: too many wait, or closed")
            self._end(number, failed(), waited=False)
        return number

    def take(self, number: int) -> Result | None:
        """A task's result, once; ``None`` before it has ended and afterwards."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, Result]:
        """All results that nobody has taken."""
        with self._lock:
            results, self._results = self._results, {}
            return results

    def close(self) -> None:
        """Waits for what runs, each of which has a time limit, and closes the descriptor. Idempotent.

        What still waits for its turn fails.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._threads.shutdown(wait=True)
        with self._lock:
            os.close(self._event_fd)

    def _begin(self, number: int, work: Callable[[], Result], failed: Callable[[], Result]) -> bool:
        try:
            self._threads.submit(self._run, number, work, failed)
        except RuntimeError:  # the interpreter ends
            return False
        return True

    def _run(self, number: int, work: Callable[[], Result], failed: Callable[[], Result]) -> None:
        try:
            if self._closed:
                self._counters.trouble(f"{self._kind}_not_begun", f"a {self._kind} was not begun: closed")
                result = failed()
            else:
                result = work()
        except Exception as error:  # noqa: BLE001 - nothing is raised into LMCache: it is a miss
            self._counters.trouble(f"{self._kind}_error", f"a {self._kind} failed: {error!r}")
            result = failed()
        self._end(number, result, waited=True)

    def _end(self, number: int, result: Result, *, waited: bool) -> None:
        with self._lock:
            self._results[number] = result
            dropped = len(self._results) > RESULTS_MAX
            if dropped:
                del self._results[next(iter(self._results))]
            self._waiting -= waited
            # A closed adapter's threads have all ended before its descriptor is closed.
            if waited or not self._closed:
                os.eventfd_write(self._event_fd, 1)
        if dropped:
            self._counters.trouble(f"{self._kind}_not_taken", f"nobody asked for the result of a {self._kind}")
