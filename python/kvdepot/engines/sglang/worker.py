"""A thread that runs jobs one after another."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Job = TypeVar("Job")
logger = logging.getLogger("sglang.kvdepot")


class Worker(Generic[Job]):
    """Runs jobs in order. Any number of threads may use it.

    Args:
        name: name of the thread.
        run: runs a job; what it raises is logged.
    """

    def __init__(self, name: str, run: Callable[[Job], None]) -> None:
        self._run_job = run
        self._jobs: deque[Job] = deque()
        self._running = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of jobs that wait. The caller limits it."""
        return len(self._jobs)

    def put(self, job: Job) -> bool:
        """Queues a job. Returns false once the worker is closed."""
        with self._changed:
            if self._closed:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def drain(self, wait_s: float) -> bool:
        """Waits until no job is waiting or running. Returns false if that takes longer than ``wait_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._running, wait_s)

    def close(self, wait_s: float) -> bool:
        """Drops the waiting jobs, and waits for the running one. Returns false after ``wait_s``. Idempotent."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._running = True
            try:
                self._run_job(job)
            except BaseException:
                # A panic of the core, too. The jobs behind it still have to run: SGLang waits for each of them.
                logger.exception("kvdepot: a job of %s failed", self._thread.name)
            finally:
                del job
                with self._changed:
                    self._running = False
                    self._changed.notify_all()
