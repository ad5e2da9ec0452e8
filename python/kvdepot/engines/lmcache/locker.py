"""Leases objects that LMCache's lookups have found until they were loaded or unlocked. Never raises.

What is not leased is found nevertheless: it may be gone by the time of its load, which is then a miss.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvdepot.engines.lmcache.counters import Counters
from kvdepot.engines.lmcache.keys import object_label
from kvdepot.engines.lmcache.locks import CLAIMS_MAX, Held, Locks, plan
from kvdepot.engines.lmcache.recent import Recent
from kvdepot.engines.lmcache.stores import PoolUse, Row, Stores
from kvdepot.errors import is_failure

LEASE_S = 30.0
"""Longest time that an object is leased. LMCache never unlocks what a prefetch found that it abandoned."""
HELD_PART = 4
"""Locks hold at most one part in this many of the pool, with what all other clients lease: stores need space, too."""
OPEN_S = 0.25
"""Seconds in which a lookup opens claims. Objects beyond that are found without a lease."""
ARRIVE_S = 0.02
"""Seconds that claims may take to find room in the pool, and their objects in a tier; then they take what is there."""
POLL_MS = 2
HAD_MAX = 65_536
"""Objects that LMCache is taken to have in its own memory: those that it has stored or loaded most recently."""


class Locker:
    """Locks of one adapter. Any number of threads may use them concurrently.

    ``lock`` waits for the depot, in bounded time. All other calls leave that to a thread, because LMCache unlocks in
    its only thread for all requests.
    """

    def __init__(self, stores: Stores, counters: Counters, timeout_ms: int) -> None:
        """``timeout_ms``: time limit of a load. A depot ends a claim that was not polled for as long."""
        self._stores = stores
        self._counters = counters
        self._lock = threading.Lock()
        self._locks = Locks(min(LEASE_S, timeout_ms / 1000))
        self._had = Recent(HAD_MAX)
        self._depot: int | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvdepot-unlock")

    def lock(self, rows: Sequence[Row]) -> None:
        """Locks objects that a lookup has found, those first that are needed most. Leases as many as it may.

        If a tier gets every block at once, objects that LMCache has stored or loaded itself are not leased: it looks up
        what it has in its own memory as well, and a claim would read all of that from the tiers for nothing. Their
        eviction from the pool loses nothing, since that tier has them.
        """
        self._check()
        if not rows:
            return
        now_s = time.monotonic()
        opened = self._claimed(rows, self._planned(rows), now_s)
        leased = {number for _, numbers in opened for number in numbers}
        grants: list[tuple[Any, list[int]]] = [
            *opened,
            (None, [number for number in range(len(rows)) if number not in leased]),
        ]
        over: list[Held] = []
        with self._lock:
            for claim, numbers in grants:
                if self._closed:
                    over += [] if claim is None else [claim]
                    continue
                names = [_label(rows[number]) for number in numbers]
                size = sum(rows[number][0].size_bytes for number in numbers)
                over += self._locks.lock(names, claim, size, time.monotonic())
        self._let_go(over)
        self._counters.add("leased", len(leased))

    def unlock(self, labels: Sequence[bytes]) -> None:
        """Ends one lock of each object."""
        self._check()
        with self._lock:
            over = self._locks.unlock(labels)
        self._let_go(over)

    def loaded(self, labels: Sequence[bytes]) -> None:
        """Notes that a load of these objects has ended, well or not. Their leases end; LMCache unlocks them later."""
        with self._lock:
            over = self._locks.loaded(labels)
        self._let_go(over)

    def had(self, label: bytes) -> None:
        """Notes that LMCache has an object in its own memory."""
        self._had.put(label)

    def delete(self, labels: Sequence[bytes]) -> None:
        """Ends all leases of these objects."""
        with self._lock:
            over = self._locks.delete(labels)
        self._let_go(over)

    def report(self) -> dict[str, int]:
        """Returns the numbers of locked objects and of claims, and how many bytes these hold."""
        self._check()
        with self._lock:
            return {"locked": len(self._locks), "claims": self._locks.claims, "leased_bytes": self._locks.size}

    def close(self) -> None:
        """Ends all leases. Idempotent."""
        with self._lock:
            self._closed = True
            over = self._locks.clear()
        self._let_go(over)
        self._thread.shutdown(wait=True)

    def _check(self) -> None:
        """Ends leases whose time is over, and takes those for lost that a depot held which is not reached any more."""
        with self._lock:
            over = self._locks.expire(time.monotonic())
            leases = self._locks.claims > 0
        self._counters.add("leases_expired", len(over))
        self._let_go(over)
        if leases and not self._stores.reaches_depot():
            self._lose()

    def _lose(self) -> None:
        """Takes all leases for lost, so that they take no room from new ones. Their objects stay locked."""
        with self._lock:
            over = self._locks.lose()
        self._counters.add("leases_lost", len(over))
        self._let_go(over)

    def _planned(self, rows: Sequence[Row]) -> list[list[int]]:
        """Returns which rows to claim together."""
        pool = self._stores.pool_use()
        if pool is None:
            return []
        with self._lock:
            before, self._depot = self._depot, pool.depot
        if before not in (None, pool.depot):
            self._lose()
        wanted = [number for number, row in enumerate(rows) if not pool.writes_through or _label(row) not in self._had]
        with self._lock:
            room = min(pool.size // HELD_PART - self._locks.size, _free(pool))
            claims = 0 if self._closed else CLAIMS_MAX - self._locks.claims
        layouts = [rows[number][0] for number in wanted]
        planned = plan([(layout, layout.size_bytes) for layout in layouts], room, claims)
        self._counters.add("not_leased", len(wanted) - sum(map(len, planned)))
        return [[wanted[index] for index in indexes] for indexes in planned]

    def _claimed(
        self, rows: Sequence[Row], planned: Sequence[list[int]], began_s: float
    ) -> list[tuple[Any, list[int]]]:
        """Returns claims, each with the rows that it holds."""
        opened: list[tuple[Any, list[int]]] = []
        for numbers in planned:
            if time.monotonic() >= began_s + OPEN_S:
                break
            claim = self._stores.claim(rows[numbers[0]][0], [rows[number][1] for number in numbers])
            if claim is None:
                break
            opened.append((claim, numbers))
        until_s = time.monotonic() + ARRIVE_S
        held = [(claim, numbers[: self._arrived(claim, until_s)]) for claim, numbers in opened]
        over = [claim for claim, numbers in held if not numbers]
        held = [(claim, numbers) for claim, numbers in held if numbers]
        # Others lease at the same time, so that only now it is known whether all of it is too much.
        pool = self._stores.pool_use() if held else None
        excess = -_free(pool) if pool is not None else 0
        while held and excess > 0:
            claim, numbers = held.pop()
            excess -= sum(rows[number][0].size_bytes for number in numbers)
            over.append(claim)
        self._let_go(over)
        self._counters.add("not_leased", sum(map(len, planned)) - sum(len(numbers) for _, numbers in held))
        return held

    def _arrived(self, claim: Any, until_s: float) -> int:
        """Returns how many objects of a claim are in the pool, or all on their way to it."""
        try:
            while True:
                settled, units, _ = claim.poll()
                if settled:
                    return int(units)
                arriving = claim.arriving()
                if arriving is not None:
                    return int(arriving[0])
                if time.monotonic() >= until_s:
                    return int(claim.settle()[1])
                claim.wait(POLL_MS)
        except BaseException as error:  # no lease
            if not is_failure(error):
                raise
            self._counters.trouble("claim_error", f"a claim failed: {error!r}")
            return 0

    def _let_go(self, claims: Sequence[Held]) -> None:
        """Releases claims in a thread, since a depot may hang."""
        if not claims:
            return
        try:
            self._thread.submit(_release, claims)
        except RuntimeError:  # closed
            _release(claims)


def _label(row: Row) -> bytes:
    return object_label(row[0].model, row[1])


def _free(pool: PoolUse) -> int:
    """Returns how many bytes of their part of the pool locks may still hold; negative = that much is too much."""
    return pool.size // HELD_PART - pool.leased


def _release(claims: Sequence[Held]) -> None:
    for claim in claims:
        _release_one(claim)


def _release_one(claim: Held) -> None:
    try:
        claim.release()
    except BaseException as error:  # the depot ends what is left, since nobody polls it
        if not is_failure(error):
            raise
