"""Tasks of LMCache's server, which submits work and polls for the result, with an event descriptor as notification."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from kvdepot.engines.lmcache.counters import Counters

Result = TypeVar("Result")

WAITING_MAX = 1024
"""Maximum number of queued or running tasks of one kind. Further ones fail."""
RESULTS_MAX = 16 * WAITING_MAX
"""Maximum number of results that have not been taken. LMCache never takes those of a prefetch that it abandoned."""


class StillCopyingError(Exception):
    """Nobody knows whether a task's memory is still being copied, so LMCache must not get it back."""


class Tasks(Generic[Result]):
    """Tasks of one kind, each with a result that is taken once. Every task ends, even one submitted after ``close``.

    Only a task that raises ``StillCopyingError`` does not, because LMCache reuses the memory of a task that has ended.

    If too many results have not been taken, the oldest one is dropped. Any number of threads may use them concurrently.
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
        """Returns the event descriptor, which is valid until ``close``."""
        return self._event_fd

    def submit(self, work: Callable[[], Result], failed: Callable[[], Result]) -> int:
        """Starts ``work`` and returns its number; ``failed`` returns the result if the work cannot be done."""
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
        """Returns a task's result, once; ``None`` before it has ended and afterwards."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, Result]:
        """Returns all results that have not been taken."""
        with self._lock:
            results, self._results = self._results, {}
            return results

    def close(self) -> None:
        """Waits for running tasks, each of which has a time limit, and closes the descriptor. Idempotent.

        Queued tasks fail.
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
        except RuntimeError:  # the interpreter is shutting down
            return False
        return True

    def _run(self, number: int, work: Callable[[], Result], failed: Callable[[], Result]) -> None:
        try:
            if self._closed:
                self._counters.trouble(f"{self._kind}_not_begun", f"a {self._kind} was not begun: closed")
                result = failed()
            else:
                result = work()
        except StillCopyingError as error:
            self._counters.trouble(f"{self._kind}_never_ends", f"LMCache gets no result of a {self._kind}: {error}")
            with self._lock:
                self._waiting -= 1
            return
        except BaseException as error:  # noqa: BLE001 - a panic, too: nothing is raised into LMCache: it is a miss
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
            # The threads of a closed adapter have all ended before its descriptor is closed.
            if waited or not self._closed:
                os.eventfd_write(self._event_fd, 1)
        if dropped:
            self._counters.trouble(f"{self._kind}_not_taken", f"LMCache did not take the result of a {self._kind}")
