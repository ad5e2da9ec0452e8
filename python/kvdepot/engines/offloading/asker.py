"""A thread that looks keys up in the depot: vLLM asks on its scheduler's thread, which must not wait."""

import queue
import threading
from collections.abc import Callable, Iterable, Sequence

from kvdepot.engines.offloading.answers import Batch

KEYS_MAX = 4096
"""Keys per lookup; the depot accepts no more."""
JOIN_S = 2.0


class Asker:
    """Answers batches in order. Batches that wait at the same time share a lookup."""

    def __init__(self, look: Callable[[Sequence[bytes]], Iterable[bool] | None]) -> None:
        """``look`` returns which keys the depot has, ``None`` if unknown. It must not raise, and returns in time."""
        self._look = look
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvdepot-lookup", daemon=True)
        self._thread.start()

    def ask(self, batch: Batch) -> None:
        """Queues a batch. Returns at once."""
        self._batches.put(batch)

    def close(self) -> None:
        """Stops the thread. Idempotent."""
        self._batches.put(None)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        batch = self._batches.get()
        while batch is not None:
            together, following = self._gather(batch)
            keys = list(dict.fromkeys(key for one in together for key in one.keys))
            found = self._found(keys)
            for one in together:
                one.answer(None if found is None else [found[key] for key in one.keys])
            if following is None:
                return
            batch = following[0] if following else self._batches.get()

    def _gather(self, first: Batch) -> tuple[list[Batch], list[Batch] | None]:
        """Returns the batches of the next lookup, and any batch taken beyond them; ``None`` = the thread should end."""
        together, count = [first], len(first.keys)
        while True:
            try:
                batch = self._batches.get_nowait()
            except queue.Empty:
                return together, []
            if batch is None:
                return together, None
            if count + len(batch.keys) > KEYS_MAX:
                return together, [batch]
            together.append(batch)
            count += len(batch.keys)

    def _found(self, keys: Sequence[bytes]) -> dict[bytes, bool] | None:
        found: dict[bytes, bool] = {}
        for begin in range(0, len(keys), KEYS_MAX):
            part = keys[begin : begin + KEYS_MAX]
            answer = self._look(part)
            if answer is None:
                return None
            found.update(zip(part, (bool(one) for one in answer), strict=True))
        return found
