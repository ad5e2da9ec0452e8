"""Threads that look up keys in the depot, so that vLLM's scheduler thread does not wait."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kvdepot.engines.offloading.answers import Batch
from kvdepot.errors import is_failure

KEYS_MAX = 4096
"""Keys per lookup; the depot accepts no more."""
THREADS = 4
"""Concurrent lookups. One that waits for a slow tier must not delay those that the pool can answer."""
JOIN_S = 2.0


class Asker:
    """Answers batches. Those that wait while all threads are busy share a lookup."""

    def __init__(
        self, look: Callable[[Sequence[bytes]], Iterable[bool] | None], trouble: Callable[[BaseException], None]
    ) -> None:
        """Starts the threads.

        Args:
            look: returns which keys the depot has, ``None`` if unknown. Has a time limit of its own, and should not
                raise.
            trouble: called with an exception that ``look`` raised; the batches of that lookup get ``None``.
        """
        self._look = look
        self._trouble = trouble
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._busy = 0
        self._threads = [threading.Thread(target=self._run, name="kvdepot-lookup", daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def ask(self, batch: Batch) -> None:
        """Queues a batch. Returns at once."""
        self._batches.put(batch)

    def close(self) -> None:
        """Stops the threads. Idempotent."""
        for _ in self._threads:
            self._batches.put(None)
        end_s = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _run(self) -> None:
        ended = False
        while not ended:
            batch = self._batches.get()
            if batch is None:
                return
            with self._lock:
                self._busy += 1
            together, ended = self._gather(batch)
            keys = list(dict.fromkeys(key for one in together for key in one.keys))
            found = self._found(keys)
            for one in together:
                one.answer(None if found is None else [found[key] for key in one.keys])
            with self._lock:
                self._busy -= 1

    def _gather(self, first: Batch) -> tuple[list[Batch], bool]:
        """Returns the batches of the next lookup, and whether the thread should end after it."""
        together, count = [first], len(first.keys)
        with self._lock:
            if self._busy < THREADS:
                return together, False
        while True:
            try:
                batch = self._batches.get_nowait()
            except queue.Empty:
                return together, False
            if batch is None:
                return together, True
            if count + len(batch.keys) > KEYS_MAX:
                self._batches.put(batch)
                return together, False
            together.append(batch)
            count += len(batch.keys)

    def _found(self, keys: Sequence[bytes]) -> dict[bytes, bool] | None:
        """Returns which keys the depot has; ``None`` if unknown."""
        found: dict[bytes, bool] = {}
        try:
            for begin in range(0, len(keys), KEYS_MAX):
                part = keys[begin : begin + KEYS_MAX]
                answer = self._look(part)
                if answer is None:
                    return None
                found.update(zip(part, (bool(one) for one in answer), strict=True))
        except BaseException as error:
            if not is_failure(error):
                raise
            self._trouble(error)
            return None
        return found
