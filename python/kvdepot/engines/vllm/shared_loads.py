"""Prefixes that loads in flight bring into vLLM's own prefix cache, where other requests will find them.

vLLM caches the pages of a load between steps when the load has ended. Requests with the same prefix that arrive
meanwhile would each load it again, into pages of their own. Nothing here reads a clock or waits.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

WAIT_S_MAX = 1.0
"""Seconds that a request waits for a load of another one (P2). Then it loads everything itself."""


class Wait(NamedTuple):
    """A request's wait for a load of another one. A request waits once until it is admitted.

    Attributes:
        load_id: the load.
        since_s: when the wait began.
        local_tokens: vLLM's own hit at that time.
        is_over: whether the request waits no more.
    """

    load_id: int
    since_s: float
    local_tokens: int
    is_over: bool = False


class _Load(NamedTuple):
    keys: Sequence[bytes]
    end: int


class SharedLoads:
    """Hash units of loads between steps that are in flight, by their keys. A key determines all units before it."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._load_of: dict[bytes, int] = {}
        self._over: list[int] = []

    def __contains__(self, load_id: int) -> bool:
        return load_id in self._loads

    def begin(self, load_id: int, keys: Sequence[bytes], begin: int, end: int) -> None:
        """Notes a load of units ``begin`` to ``end`` of a request whose units have these keys."""
        loaded = tuple(keys[begin:end])
        self._loads[load_id] = _Load(loaded, end)
        for key in loaded:
            self._load_of.setdefault(key, load_id)

    def ended(self, load_id: int) -> None:
        """Notes that a load has ended well. It is forgotten after the next step has been planned.

        vLLM caches its pages when it plans that step: up to 0.31 maybe after it has asked for others' hits.
        """
        if load_id in self._loads:
            self._over.append(load_id)

    def step_planned(self) -> None:
        """Forgets the loads that had ended before this step."""
        for load_id in self._over:
            self.forget(load_id)
        self._over.clear()

    def forget(self, load_id: int) -> None:
        """Forgets a load that brings nothing, or nothing more. One that is not known is ignored."""
        load = self._loads.pop(load_id, None)
        for key in load.keys if load is not None else ():
            if self._load_of.get(key) == load_id:
                del self._load_of[key]

    def find(self, keys: Sequence[bytes], begin: int, end: int, own_end: int, *, all_of_it: bool = False) -> int | None:
        """Returns the number of a load that is worth waiting for, instead of loading units ``begin`` to ``end`` again.

        Waiting costs the rest of that load, and a further step for a load of what is not shared. So the shared part
        must be at least as long as either.

        Args:
            keys: keys of the request's units.
            begin: first unit of the hit.
            end: unit after its last one.
            own_end: unit after the last one that vLLM finds in its own cache, which leaves a token to compute.
            all_of_it: whether the other load helps only if it ends where the hit does, as with windows and states.
        """
        load_id = self._load_of.get(keys[begin]) if begin < end else None
        if load_id is None:
            return None

        def is_other(unit: int) -> bool:
            return self._load_of.get(keys[unit]) != load_id

        load_end = self._loads[load_id].end
        shared_end = min(begin + bisect_left(range(begin, end), True, key=is_other), own_end)
        if all_of_it and not shared_end == end == load_end:
            return None
        rest = max(load_end - shared_end, end - shared_end)
        return load_id if shared_end - begin >= max(rest, 1) else None
