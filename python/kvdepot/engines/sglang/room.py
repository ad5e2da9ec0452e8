"""One SGLang rank's access to the depot: one attachment, a namespace for each pool, and the held hits.

Nothing here raises for an operational failure, which is counted and becomes a miss. Every call is bounded: a lookup,
dump or load by ``call_s`` or ``timeout_ms``, whichever is shorter, a claim by ``call_timeout_ms`` and ``CLAIM_S``.
"""

import bisect
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdepot import Group
from kvdepot.absence import tell_if_absent
from kvdepot.config import KVDepotConfig
from kvdepot.engines.attachment import attach
from kvdepot.engines.copies import copied
from kvdepot.engines.counters import Counters
from kvdepot.engines.sglang.leases import Leases
from kvdepot.engines.sglang.pages import PoolPages
from kvdepot.errors import KVDepotError

CALL_S = 3.0
"""Seconds that one lookup, dump or load may take, and after the start of SGLang's call in which another may begin.

So a call ends within twice that. SGLang gives its threads 10 s to end when it flushes, and kills itself if they have
not.
"""
LOOKUP_PAGES = 4096
"""Pages per lookup: the depot accepts no more at a time. Each batch has its own ``CALL_S``."""
CLAIM_S = 1.0
"""Seconds that blocks of a hit may take to arrive in the pool, or to be found in a tier, before it is cut."""
CLAIM_POLL_MS = 2
HELD_PART = 4
"""Hits hold at most one part in this many of the pool, with what all other clients lease: dumps need space, too."""
CLAIMS = 2
"""Claims of a hit: if the first one shows that others lease more than was known, the second one is shorter."""
KNOWN_S = 0.1
"""Seconds that the depot's answer about its pool limits the next hits. Later ones are claimed, and checked again."""
FULL = ("busy", "no_space")
"""Failures of a dump because others use the depot. The dump is retried."""
FULL_AGAIN_S = 0.05

logger = logging.getLogger("sglang.kvdepot")

Verb: TypeAlias = Literal["dump", "load"]


@dataclass(frozen=True)
class Leased:
    """What all clients of the depot leased after a claim of ours.

    Attributes:
        free_bytes: bytes of the part that hits may hold that nobody leased; negative = more than that was leased.
        held_bytes: bytes that were held here.
        ends_s: time from which this limits nothing any more.
    """

    free_bytes: int
    held_bytes: int
    ends_s: float


@dataclass(frozen=True)
class Pool:
    """A pool of SGLang whose pages are blocks of a namespace."""

    pages: PoolPages
    namespace: Any
    store: Any


@dataclass(frozen=True)
class Wanted:
    """Pages that a request asks for.

    Attributes:
        pools: the pools whose pages make up a hit, by name.
        windows: number of pages that each of them needs at the hit's end; 0 = all.
        hashes: hashes of the pages.
    """

    pools: Mapping[str, Pool]
    windows: Mapping[str, int]
    hashes: Sequence[bytes]

    def size(self, units: int) -> int:
        """Returns the bytes that a hit of ``units`` pages holds."""
        return sum(pool.pages.size_bytes * min(self.windows[name] or units, units) for name, pool in self.pools.items())

    def fits(self, space: int) -> int:
        """Returns the number of pages of the longest hit that holds at most ``space`` bytes."""
        return bisect.bisect_right(range(1, len(self.hashes) + 1), space, key=self.size)


class Room:
    """Looks up, claims, dumps and loads pages by the names of SGLang's pools. Any number of threads may use it."""

    def __init__(
        self,
        config: KVDepotConfig,
        counters: Counters,
        connect: Callable[[KVDepotConfig], Any] | None = None,
        *,
        ranks: int = 1,
        call_s: float = CALL_S,
    ) -> None:
        """Attaches to the node's depot, which is started if none answers.

        Args:
            config: how to reach it, and how long to wait.
            counters: count failures.
            connect: function that attaches; ``None`` = to the depot of ``config``.
            ranks: number of this engine's ranks on this node, which all hold hits in the same pool.
            call_s: seconds that an operation may take.

        Raises:
            ConfigError: the pool that would be started does not fit the machine.
            ProtocolError: another service, or another version of kvdepot, answers on the socket.
        """
        self._config = config
        self._counters = counters
        self._depot = (connect or _attach)(config)
        self._pools: dict[str, Pool] = {}
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._leases = Leases(0)
        self._leased: Leased | None = None
        self._ranks = max(1, ranks)
        self._call_ms = min(config.timeout_ms, int(call_s * 1e3))

    def until(self) -> float:
        """Returns the time by which the last operation of a call that begins now must begin, by ``time.monotonic``."""
        return time.monotonic() + self._call_ms / 1e3

    @property
    def attached(self) -> bool:
        """Whether calls currently reach a depot."""
        return bool(self._depot.attached)

    def open(self, name: str, pages: PoolPages, facts: Mapping[str, object]) -> None:
        """Opens a pool's namespace, replacing an earlier one of that name.

        Raises:
            ConfigError: facts or layout are wrong.
            UnavailableError, UnsupportedError: no copy engine reaches the pool's memory.
        """
        namespace = self._depot.open_namespace(facts, layout=pages.layout)
        store = self._depot.open(namespace=namespace, cuda_device=pages.cuda_device, timeout_ms=self._call_ms)
        pages.attach(store)
        with self._lock:
            self._leases.clear()
            before = self._pools.get(name)
            self._pools[name] = Pool(pages, namespace, store)
        if before is not None:
            before.store.close(0)
            before.namespace.close()

    def lookup(self, name: str, hashes: Sequence[bytes], until_s: float) -> npt.NDArray[np.bool_]:
        """Returns for each page whether the depot has it, in its pool or a tier; all false after ``until_s``."""
        found: npt.NDArray[np.bool_] = np.zeros(len(hashes), dtype=bool)
        pool = self._pool(name, len(hashes), until_s)
        if pool is not None and len(hashes):
            try:
                for begin in self._in_time(len(hashes), until_s):
                    part = hashes[begin : begin + LOOKUP_PAGES]
                    found[begin : begin + len(part)] = np.asarray(pool.store.lookup(part), dtype=bool)
            except Exception as error:  # noqa: BLE001 - a miss
                self._counters.trouble("lookup_error", f"a lookup failed: {error!r}", len(hashes))
        return found

    def lookup_on_prefix(self, name: str, hashes: Sequence[bytes], until_s: float) -> int:
        """Returns how many leading pages the depot has; none after ``until_s``."""
        pool = self._pool(name, len(hashes), until_s)
        if pool is None or not hashes:
            return 0
        found = 0
        try:
            for begin in self._in_time(len(hashes), until_s):
                found += int(pool.store.lookup_on_prefix(hashes[begin : begin + LOOKUP_PAGES]))
                if found < min(begin + LOOKUP_PAGES, len(hashes)):
                    break
        except Exception as error:  # noqa: BLE001 - a miss
            self._counters.trouble("lookup_error", f"a lookup failed: {error!r}", len(hashes))
        return found

    def hold(
        self,
        windows: Mapping[str, int],
        hashes: Sequence[bytes],
        until_s: float,
        *,
        owner: bytes | None = None,
        wait_s: float = CLAIM_S,
    ) -> int | None:
        """Brings a hit into the pool, as far as there is space, and holds it there until its pools have read it.

        Several engines may claim at the same time. So after each claim the depot is asked what all its clients lease;
        if that is too much, the claim is given back.

        Args:
            windows: names of the pools, each with the number of pages that it needs at the hit's end; 0 = all.
            hashes: the requested pages.
            until_s: time after which nothing begins.
            owner: name under which only verified pages are held, until ``let_go``, instead of what was held for it;
                ``None`` = until they have been read, and pages in flight count as well.
            wait_s: seconds that pages may take to arrive from a tier.

        Returns:
            How many leading pages are held, or in flight; ``None`` if nothing was tried.
        """
        if owner is not None:
            self.let_go(owner)
        pools = {name: self._pool(name, len(hashes), until_s) for name in windows}
        if not hashes or not pools or any(pool is None for pool in pools.values()):
            return None
        opened = {name: pool for name, pool in pools.items() if pool is not None}
        wanted = Wanted(opened, windows, hashes)
        try:
            claim, units, fits = self._claimed(wanted, owner, wait_s)
        except Exception as error:  # noqa: BLE001 - a miss
            self._counters.trouble("claim_error", f"a claim failed: {error!r}", len(hashes))
            return 0
        if units == fits:
            self._counters.add("not_leased", len(hashes) - fits)
        if claim is None:
            return None
        if units <= 0:
            claim.release()
            return 0
        key = hashes[units - 1] if owner is None else owner
        with self._lock:
            self._leases.hold(claim, key, opened, wanted.size(units), time.monotonic(), units=units)
        self._counters.add("leased", units)
        return units

    def renew(self, owner: bytes) -> int:
        """Returns how many leading pages are held for an owner, who keeps them for another while; 0 = none any more."""
        with self._lock:
            lease = self._leases.renew(owner, time.monotonic())
        if lease is None:
            return 0
        # A claim that nobody polls ends, and one on a depot that has died has ended.
        settled, units, _ = lease.claim.poll()
        if self.attached and settled and units >= lease.units:
            return lease.units
        self.let_go(owner)
        return 0

    def let_go(self, owner: bytes) -> None:
        """Releases what is held for an owner, and what has expired."""
        with self._lock:
            self._leases.drop(owner)
            self._counters.add("leases_expired", self._leases.expire(time.monotonic()))

    def forget(self) -> None:
        """Releases everything that is held."""
        with self._lock:
            self._leases.clear()

    def move(
        self,
        verb: Verb,
        name: str,
        hashes: Sequence[bytes],
        places: npt.NDArray[Any],
        until_s: float | None = None,
        *,
        again_until_s: float = math.inf,
    ) -> list[bool]:
        """Dumps or loads pages. Returns for each whether it succeeded, once nothing copies from or to them any more.

        Args:
            verb: which of the two.
            name: name of the pool.
            hashes: hashes of the pages.
            places: where they are, one row per page, as the pool's ``submit`` takes them.
            until_s: time after which no task begins; ``None`` = as from ``until``.
            again_until_s: time after which no dump that found the depot busy or full is retried, if it is earlier.
        """
        until_s = self.until() if until_s is None else until_s
        again_until_s = min(until_s, again_until_s)
        ended = np.zeros(len(hashes), dtype=bool)
        pool = self._pool(name, len(hashes), until_s)
        if pool is None or not hashes:
            return [bool(one) for one in ended]
        rest = np.arange(len(hashes))
        while len(rest):
            failed, kinds = self._moved(verb, pool, [hashes[row] for row in rest.tolist()], places[rest])
            ended[np.delete(rest, failed)] = True
            rest = rest[failed]
            again = verb == "dump" and bool(kinds) and all(kind in FULL for kind in kinds)
            in_time = time.monotonic() + FULL_AGAIN_S < again_until_s
            if not (again and in_time and self.attached) or self._closing.wait(FULL_AGAIN_S):
                for kind, count in kinds.items():
                    self._counters.trouble(f"{verb}_{kind}", f"{count} pages of a {verb} failed: {kind}", count)
                break
            self._counters.add("dump_again", len(rest))
        self._counters.add(f"{verb}ed", int(ended.sum()))
        return [bool(one) for one in ended]

    def begin_load(self, name: str, hashes: Sequence[bytes], places: npt.NDArray[Any]) -> Any | None:
        """Begins to load pages, as in ``move``. Returns the task, or ``None`` if none began."""
        pool = self._pool(name, len(hashes), math.inf)
        if pool is None:
            return None
        try:
            return pool.pages.submit(pool.store, "load", hashes, places)
        except Exception as error:  # noqa: BLE001 - the caller counts it
            self._counters.trouble("load_error", f"a load failed: {error!r}", len(hashes))
            return None

    def let_end(self, verb: Verb, task: Any, pages: int) -> None:
        """Waits until a task copies no more: SGLang may reuse the pages only after it.

        One that does not tell is given its time limit, which ends it.
        """
        limit_s = self._call_ms / 1e3
        if not copied(task, lambda why: self._counters.trouble(f"{verb}_error", f"a {verb}: {why}", pages), limit_s):
            self._closing.wait(limit_s)

    def read(self, name: str, hashes: Sequence[bytes]) -> None:
        """Notes that these pages were read, or could not be. Releases their leases, and expired ones."""
        with self._lock:
            self._leases.read(name, hashes)
            self._counters.add("leases_expired", self._leases.expire(time.monotonic()))

    def reset(self) -> bool:
        """Makes everything in all pools unreachable, in every tier, for every engine. Returns false if unconfirmed."""
        with self._lock:
            self._leases.clear()
            namespaces = [pool.namespace for pool in self._pools.values()]
        try:
            self._depot.reset(namespaces)
        except Exception as error:  # noqa: BLE001 - the caller asks again
            self._counters.trouble("reset_error", f"the depot did not confirm a reset: {error!r}")
            return False
        return True

    def held(self) -> int:
        """Returns the number of held hits."""
        with self._lock:
            return len(self._leases)

    def owners(self) -> set[bytes]:
        """Returns the keys of all leases: the owners that something is held for."""
        with self._lock:
            return self._leases.keys()

    def close(self) -> None:
        """Waits for tasks in flight, each of which is bounded, and detaches. Idempotent."""
        self._closing.set()
        with self._lock:
            self._leases.clear()
            pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.store.close(self._call_ms)
        self._depot.close()

    def _pool(self, name: str, pages: int, until_s: float) -> Pool | None:
        pool = self._pools.get(name)
        if pool is None:
            self._counters.trouble("unknown_pool", f"pool {name} is not open", pages)
            return None
        if not self._depot.attached:
            self._counters.trouble("no_depot", f"no depot answers: {self._depot.trouble or 'none yet'}", pages)
            return None
        if time.monotonic() >= until_s:
            self._too_late(pages)
            return None
        return pool

    def _in_time(self, pages: int, until_s: float) -> Iterator[int]:
        """Yields the start of each batch of a lookup; from ``until_s`` on, the rest is a miss."""
        for begin in range(0, pages, LOOKUP_PAGES):
            if begin and time.monotonic() >= until_s:
                self._too_late(pages - begin)
                return
            yield begin

    def _too_late(self, pages: int) -> None:
        self._counters.trouble("too_late", f"a call has taken {self._call_ms} ms: the rest of it is a miss", pages)

    def _claimed(self, wanted: Wanted, owner: bytes | None, wait_s: float) -> tuple[Any, int, int]:
        """Returns a claim, or ``None`` without space; its number of pages, and the number for which there was space."""
        for attempt in range(CLAIMS):
            fits = wanted.fits(self._space(wanted.size(len(wanted.hashes))))
            if not fits:
                break
            claim = self._depot.claim(
                [Group([pool.namespace], wanted.windows[name]) for name, pool in wanted.pools.items()],
                wanted.hashes[:fits],
                label=owner.decode() if owner is not None else "",
            )
            units = self._arrived(claim, 0 if attempt else wait_s, in_flight=owner is None)
            if units <= 0 or self._is_within(wanted.size(units)):
                return claim, units, fits
            claim.release()
        return None, 0, 0

    def _space(self, wanted: int) -> int:
        """Returns how many bytes a hit of ``wanted`` bytes may hold, as far as is known."""
        if not self._leases.size_max:
            self._is_within(0)
        now_s = time.monotonic()
        with self._lock:
            self._counters.add("leases_expired", self._leases.expire(now_s))
            if not self._leases.size_max:
                # If the depot does not report its pool's size, one hit is held at a time, and the depot is asked again.
                return max(0, wanted - self._leases.size)
            room, leased = self._leases.room(), self._leased
            if leased is not None and now_s < leased.ends_s:
                room = min(room, leased.free_bytes - (self._leases.size - leased.held_bytes))
            return max(0, room)

    def _is_within(self, claimed: int) -> bool:
        """Asks the depot about its pool, which may be another one after a restart.

        Returns whether all clients together lease no more of it than hits may hold, with ``claimed`` bytes that are to
        be held here; true if the depot does not report that.
        """
        try:
            depot = self._depot.stats()["depot"]
            pool_bytes = int(depot["pool_bytes"])
            leased = int(depot.get("pool_leased_bytes", 0)) + int(depot.get("pool_fetching_bytes", 0))
        except (KeyError, TypeError, ValueError, KVDepotError):
            return True
        part = pool_bytes // HELD_PART
        with self._lock:
            self._leases.size_max = max(1, part // self._ranks) if pool_bytes else 0
            self._leased = Leased(part - leased, self._leases.size + claimed, time.monotonic() + KNOWN_S)
        return leased <= part or not pool_bytes

    def _arrived(self, claim: Any, wait_s: float, *, in_flight: bool) -> int:
        """Returns how many pages of a claim are verified in the pool, or, if ``in_flight``, all on their way to it."""
        until_s = time.monotonic() + wait_s
        while True:
            settled, units, _ = claim.wait(CLAIM_POLL_MS)
            if settled:
                return int(units)
            arriving = claim.arriving() if in_flight else None
            if arriving is not None:
                return int(arriving[0])
            if time.monotonic() >= until_s or self._closing.is_set():
                return int(claim.settle()[1])

    def _moved(
        self, verb: Verb, pool: Pool, hashes: list[bytes], places: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[np.int64], dict[str, int]]:
        """Returns the indexes of the failed rows, and their number by kind."""
        every = np.arange(len(hashes), dtype=np.int64)
        try:
            task = pool.pages.submit(pool.store, verb, hashes, places)
        except Exception as error:  # noqa: BLE001 - a miss
            self._counters.trouble(f"{verb}_error", f"a {verb} failed: {error!r}", len(hashes))
            return every, {}
        self.let_end(verb, task, len(hashes))
        result = task.result()
        return np.asarray(result.failed, dtype=np.int64), dict(result.failures)


def _attach(config: KVDepotConfig) -> Any:
    socket, began_s = config.socket_path(), time.monotonic()
    depot = attach(config)
    tell_if_absent(depot, config, socket, time.monotonic() - began_s, logger)
    return depot
