"""Batches of loads, and those that outlive a flush. No clock, no depot.

SGLang numbers batches from 0 again after a flush and reuses the pages that they write. So no earlier load may begin or
be reported afterwards, and if one still writes then, what SGLang computes in its pages must not be stored.
"""

import threading
from collections import Counter
from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Number of a batch in SGLang's counter, and the flush after which it was queued."""

    number: int
    generation: int


class Batches:
    """Reports to SGLang's ``LayerWiseLoadCounter``. Any number of threads may use it."""

    def __init__(self, counter: Any, layers: int) -> None:
        """Begins without batches, each of which has this many layers."""
        self._counter = counter
        self._last_layer = layers - 1
        self._lock = threading.Lock()
        self._generation = 0
        self._oldest = 0
        self._open: set[int] = set()
        self._writing: Counter[int] = Counter()
        self._doubtful = False

    @property
    def doubtful(self) -> bool:
        """Whether SGLang's pages may have bytes of a load from before the last flush."""
        return self._doubtful

    @property
    def late(self) -> int:
        """Number of batches from before the last flush that still write."""
        with self._lock:
            return self._late()

    def queue(self) -> Batch:
        """Returns a new batch, none of whose layers is in place."""
        with self._lock:
            index = int(self._counter.update_producer())
            self._open.add(index)
            return Batch(index, self._generation)

    def begin(self, batch: Batch) -> bool:
        """Returns whether a batch may write to its pages; if so, ``end`` must follow."""
        with self._lock:
            if batch.generation != self._generation:
                return False
            self._writing[batch.generation] += 1
            return True

    def end(self, batch: Batch) -> None:
        """Notes that a batch writes no more."""
        with self._lock:
            self._writing[batch.generation] -= 1

    def complete(self, batch: Batch, layer: int) -> None:
        """Reports that a layer is in place."""
        with self._lock:
            if batch.generation >= self._oldest:
                self._counter.complete(batch.number, layer)
                if layer == self._last_layer:
                    self._open.discard(batch.number)

    def fail(self, batch: Batch, error: BaseException) -> None:
        """Reports that the layers that are not in place will not be."""
        with self._lock:
            if batch.generation >= self._oldest:
                self._counter.fail(batch.number, error)
                self._open.discard(batch.number)

    def flush(self) -> None:
        """Notes that SGLang is about to forget all batches: none that is queued begins any more."""
        with self._lock:
            self._generation += 1

    def reuse(self) -> int:
        """Forgets all batches, whose pages are reused from now on. Returns how many still write."""
        with self._lock:
            late = self._late()
            self._doubtful = late > 0
            self._oldest = self._generation
            for index in self._open:
                self._counter.fail(index, RuntimeError("SGLang has cleared its cache"))
            self._open.clear()
            self._counter.reset()
            return late

    def _late(self) -> int:
        return sum(count for generation, count in self._writing.items() if generation < self._generation)
