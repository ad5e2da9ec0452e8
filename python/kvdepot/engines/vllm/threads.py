"""Threads for work that may never end: nothing waits for them, not even the end of the process."""

import queue
import threading
from collections.abc import Callable

from kvdepot.engines.vllm.log import connector_logger

logger = connector_logger()


class Threads:
    """Threads that run work in the order in which it comes. Each is started when all others are busy, and stays."""

    def __init__(self, threads_max: int, waiting_max: int) -> None:
        """``waiting_max``: how much work may wait for a thread."""
        self._threads_max, self._waiting_max = threads_max, waiting_max
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threads = 0
        self._unfinished = 0

    def begin(self, work: Callable[[], None]) -> None:
        """Runs work on a thread, at once or when one is free. Never waits.

        Raises:
            RuntimeError: no thread can be started, or too much waits for one.
        """
        with self._lock:
            if self._unfinished >= self._threads_max + self._waiting_max:
                raise RuntimeError("too much waits for a thread")
            if self._threads <= self._unfinished and self._threads < self._threads_max:
                self._start()
            self._unfinished += 1
        self._work.put(work)

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name="kvdepot-adapter", daemon=True).start()
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads += 1

    def _run(self) -> None:
        while True:
            try:
                self._work.get()()
            except Exception:
                logger.exception("kvdepot: work on another thread failed")
            with self._lock:
                self._unfinished -= 1
