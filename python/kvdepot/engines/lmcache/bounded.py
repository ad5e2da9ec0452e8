"""Work of one kind that a coroutine waits for, on separate threads and with a bounded queue."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvdepot.engines.lmcache.counters import Counters
from kvdepot.errors import is_failure

WAITING_MAX = 1024
"""Maximum number of calls of one kind that are queued or running. Further ones fail."""


class Bounded:
    """Threads for one kind of work. Work that does not fit the queue, comes after ``close`` or fails is a counted miss.

    Any number of threads may use it concurrently.
    """

    def __init__(self, kind: str, threads: int, counters: Counters, at_most: int = WAITING_MAX) -> None:
        self._kind = kind
        self._counters = counters
        self._at_most = at_most
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=f"kvdepot-{kind}")
        self._lock = threading.Lock()
        self._waiting = 0
        self._closed = False

    async def run(self, work: Callable[[], Any], missed: Any) -> Any:
        """Returns the result of ``work``, or ``missed``. Does not block the event loop."""
        future = self.submit(lambda: self._unless_closed(work, missed))
        if future is None:
            return missed
        try:
            return await asyncio.wrap_future(future)
        except BaseException as error:  # nothing is raised into LMCache: it is a miss
            if not is_failure(error):
                raise
            self._counters.trouble(f"{self._kind}_error", f"a {self._kind} failed: {error!r}")
            return missed

    def submit(self, work: Callable[[], Any]) -> "Future[Any] | None":
        """Starts ``work``; returns ``None`` if too much is queued, or after ``close``."""
        with self._lock:
            fits = self._waiting < self._at_most and not self._closed
            self._waiting += fits
        if fits:
            try:
                future = self._threads.submit(work)
            except RuntimeError:  # closed meanwhile, or the interpreter is shutting down
                self._leave()
            else:
                # Also called when a coroutine cancels work that is still queued.
                future.add_done_callback(self._leave)
                return future
        self._counters.trouble(f"{self._kind}_not_begun", f"a {self._kind} was not begun: too many wait, or closed")
        return None

    def close(self) -> None:
        """Waits for running work; queued work is a miss. Idempotent."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=True)

    def _unless_closed(self, work: Callable[[], Any], missed: Any) -> Any:
        if not self._closed:
            return work()
        self._counters.trouble(f"{self._kind}_not_begun", f"a {self._kind} was not begun: closed")
        return missed

    def _leave(self, _: object = None) -> None:
        with self._lock:
            self._waiting -= 1
