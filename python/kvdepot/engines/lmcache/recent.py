"""A bounded table of the most recent hashes, each with a number."""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable

RECENT_MAX = 262_144
"""Takes 40 to 50 MB."""


class Recent:
    """A bounded table of hashes, which evicts the oldest. Any number of threads may use it concurrently."""

    def __init__(self, at_most: int = RECENT_MAX) -> None:
        self._at_most = at_most
        self._found: OrderedDict[bytes, int] = OrderedDict()
        self._marks = itertools.count(1)
        self._lock = threading.Lock()

    def put(self, name: bytes, number: int = 0) -> bool:
        """Adds ``name``, or makes it the most recent. Returns false if it was already there."""
        with self._lock:
            new = name not in self._found
            self._found[name] = number
            self._found.move_to_end(name)
            if len(self._found) > self._at_most:
                self._found.popitem(last=False)
            return new

    def take(self, name: bytes, only: int | None = None) -> int | None:
        """Removes ``name`` and returns its number; ``None`` if it is absent, or has another number than ``only``."""
        with self._lock:
            if only is not None and self._found.get(name) != only:
                return None
            return self._found.pop(name, None)

    def mark(self, name: bytes) -> None:
        """Adds ``name`` with a number that no other mark has."""
        self.put(name, next(self._marks))

    def marks(self, names: Iterable[bytes]) -> dict[bytes, int]:
        """Returns the numbers of the names that are present."""
        with self._lock:
            return {name: self._found[name] for name in names if name in self._found}

    def __contains__(self, name: bytes) -> bool:
        return name in self._found

    def __len__(self) -> int:
        return len(self._found)
