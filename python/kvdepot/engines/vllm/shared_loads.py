"""Prefixes that loads in flight bring into vLLM's own prefix cache, where other requests will find them.

vLLM caches the pages of a load between steps when the load has ended. Requests with the same prefix that arrive
meanwhile would each load it again, into pages of their own. Nothing here reads a clock or waits.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

WAIT_S_MAX = 1.0
"""Seconds that a request waits for loads of others in all (P2). Then it loads everything itself."""


class _Load(NamedTuple):
    keys: Sequence[bytes]
    end: int


class SharedLoads:
    """Hash units of loads between steps that are in flight, by their keys. A key determines all units before it."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._load_of: dict[bytes, int] = {}

    def begin(self, load_id: int, keys: Sequence[bytes], begin: int, end: int) -> None:
        """Notes a load of units ``begin`` to ``end`` of a request whose units have these keys."""
        loaded = tuple(keys[begin:end])
        self._loads[load_id] = _Load(loaded, end)
        for key in loaded:
            self._load_of.setdefault(key, load_id)

    def ended(self, load_id: int) -> None:
        """Forgets a load that has ended, however it did. One that is not known is ignored."""
        load = self._loads.pop(load_id, None)
        for key in load.keys if load is not None else ():
            if self._load_of.get(key) == load_id:
                del self._load_of[key]

    def worth_waiting_for(self, keys: Sequence[bytes], begin: int, end: int, *, all_of_it: bool = False) -> int:
        """Returns how many leading units of a hit to take from another request's load instead of loading them again.

        0 = load now. Waiting costs the rest of that load, and a further step for a load of what is not shared. So the
        shared part must be at least as long as either.

        Args:
            keys: keys of the request's units.
            begin: first unit of the hit.
            end: unit after its last one.
            all_of_it: whether the other load helps only if it ends where the hit does, as with windows and states.
        """
        load_id = self._load_of.get(keys[begin]) if begin < end else None
        if load_id is None:
            return 0

        def is_other(unit: int) -> bool:
            return self._load_of.get(keys[unit]) != load_id

        shared_end = begin + bisect_left(range(begin, end), True, key=is_other)
        shared = shared_end - begin
        if all_of_it and not shared_end == end == self._loads[load_id].end:
            return 0
        return shared if shared >= max(self._loads[load_id].end - shared_end, end - shared_end) else 0
