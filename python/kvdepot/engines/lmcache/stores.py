"""The stores of one adapter or backend, one per layout. They never raise: a failure is a miss, and is counted."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

import kvdepot
from kvdepot.config import KVDepotConfig
from kvdepot.engines.copies import copied
from kvdepot.engines.lmcache.counters import Counters
from kvdepot.engines.lmcache.facts import Layout
from kvdepot.errors import is_failure

LAYOUTS_MAX = 64
"""Maximum number of open layouts."""
OPEN_AGAIN_S = 30.0
NO_TIERS = frozenset({"Cache", "Staging", "Empty"})
"""Parts of a pipeline that keep nothing below the pool."""

GONE = frozenset({"not_found", "corrupt"})
"""Kinds of failure of a block that the depot does not have any more, or of one that it could not read in time."""

Row: TypeAlias = tuple[Layout, bytes]
Place: TypeAlias = tuple[Layout, bytes, int]
Verb: TypeAlias = Literal["dump", "load"]


@dataclass(frozen=True)
class Moved:
    """Outcome of a dump or a load.

    Attributes:
        done: whether each object was stored or loaded.
        missed: whether each object may be gone: it failed, and all failures of its task were those of ``GONE``.
        copying: whether each object's memory may still be copied, because its task does not tell: it must never be
            given back.
    """

    done: list[bool]
    missed: list[bool]
    copying: list[bool]


@dataclass(frozen=True)
class PoolUse:
    """How much of a depot's pool is in use by requests.

    Attributes:
        size: bytes of the pool.
        leased: bytes that all clients lease, or that tiers are reading.
        writes_through: whether a tier gets every block at once, and the pool keeps it until then.
        depot: number of the depot's process.
    """

    size: int
    leased: int
    writes_through: bool
    depot: int


@dataclass
class _Slot:
    lock: threading.Lock = field(default_factory=threading.Lock)
    store: Any = None
    again_s: float = 0.0


class Stores:
    """Dumps, loads and looks up objects of many layouts. Any number of threads may use them concurrently."""

    def __init__(
        self,
        config: KVDepotConfig,
        facts: Callable[[Layout], Mapping[str, object]],
        counters: Counters,
        attach: Callable[..., Any] | None = None,
    ) -> None:
        self._config = config
        self._facts = facts
        self._counters = counters
        self._attach = attach or kvdepot.attach
        self._attaching = threading.Lock()
        self._depot: Any = None
        self._lock = threading.Lock()
        self._slots: dict[Layout, _Slot] = {}
        self._closed = False

    def lookup(self, rows: Sequence[Row]) -> list[bool]:
        """Returns for each block whether the depot has it."""
        found = [False] * len(rows)
        for layout, numbers in _by_layout(rows).items():
            store = self._store(layout, len(numbers))
            if store is None:
                continue
            try:
                has = store.lookup([rows[number][1] for number in numbers])
                attached = store.attached
            except BaseException as error:  # a miss
                if not is_failure(error):
                    raise
                self._counters.trouble("lookup_error", f"a lookup failed: {error!r}", len(numbers))
                continue
            if not attached:
                self._counters.trouble(
                    "no_depot", "no depot answers: everything is a miss until one does", len(numbers)
                )
            for number, there in zip(numbers, has, strict=True):
                found[number] = bool(there)
        return found

    def gone(self, rows: Sequence[Row]) -> list[bool]:
        """Returns for each block whether a depot has answered that it does not have it.

        A lookup that fails finds nothing, too. Only the client's count of failed lookups shows the difference.
        """
        gone = [False] * len(rows)
        for layout, numbers in _by_layout(rows).items():
            store = self._store(layout, 0)
            if store is None:
                continue
            try:
                if not store.attached:
                    continue
                failed = _failed_lookups(store)
                has = store.lookup([rows[number][1] for number in numbers])
                answered = any(has) or _failed_lookups(store) == failed
            except BaseException as error:  # nothing is known then
                if not is_failure(error):
                    raise
                self._counters.trouble("lookup_error", f"a lookup failed: {error!r}", len(numbers))
                continue
            for number, there in zip(numbers, has, strict=True):
                gone[number] = answered and not there
        return gone

    def move(self, verb: Verb, places: Sequence[Place]) -> Moved:
        """Dumps or loads objects, and waits until nothing copies any more, except what ``copying`` names."""
        moved = Moved([False] * len(places), [False] * len(places), [False] * len(places))
        tasks = []
        for layout, numbers in _by_layout(places).items():
            store = self._store(layout, len(numbers))
            if store is None:
                continue
            addresses = np.array([[places[number][2]] for number in numbers], dtype=np.uint64)
            try:
                tasks.append((getattr(store, verb)([places[number][1] for number in numbers], addresses), numbers))
            except BaseException as error:  # a miss; other tasks still copy, so this must not return yet
                if not is_failure(error):
                    raise
                self._counters.trouble(f"{verb}_error", f"a {verb} failed: {error!r}", len(numbers))
        for task, numbers in tasks:
            self._take(verb, task, numbers, moved)
        return moved

    def _take(self, verb: Verb, task: Any, numbers: Sequence[int], moved: Moved) -> None:
        """Waits for a task of the objects with these numbers, and notes in ``moved`` what became of them."""
        blocks = len(numbers)
        limit_s = self._config.timeout_ms / 1e3
        if not copied(task, lambda why: self._counters.trouble(f"{verb}_error", f"a {verb}: {why}", blocks), limit_s):
            self._counters.trouble(f"{verb}_unknown", f"memory that a {verb} may still copy is kept", blocks)
            for number in numbers:
                moved.copying[number] = True
            return
        try:
            result = task.result()
        except BaseException as error:  # a miss
            if not is_failure(error):
                raise
            self._counters.trouble(f"{verb}_error", f"a {verb} failed: {error!r}", len(numbers))
            return
        failed = set(result.failed.tolist())
        for kind, count in result.failures.items():
            self._counters.trouble(f"{verb}_{kind}", f"{count} objects of a {verb} failed: {kind}", count)
        self._counters.add(f"{verb}ed", len(numbers) - len(failed))
        # A task does not say which block failed in which way.
        may_be_gone = set(result.failures) <= GONE
        for index, number in enumerate(numbers):
            moved.done[number] = index not in failed
            moved.missed[number] = index in failed and may_be_gone

    def claim(self, layout: Layout, names: Sequence[bytes]) -> Any | None:
        """Claims the longest prefix of these blocks of a layout that the depot has. Returns ``None`` if that failed."""
        store, depot = self._store(layout, 0), self._depot
        if store is None or depot is None:
            return None
        try:
            return depot.claim([store], names) if store.attached else None
        except BaseException as error:  # nothing is leased
            if not is_failure(error):
                raise
            self._counters.trouble("claim_error", f"a claim failed: {error!r}", len(names))
            return None

    def pool_use(self) -> PoolUse | None:
        """Asks the depot how much of its pool is leased. Returns ``None`` if it does not answer."""
        depot = self._depot
        try:
            stats = depot.stats()["depot"]
            leased = int(stats["pool_leased_bytes"]) + int(stats["pool_fetching_bytes"])
            tiers = {name.strip() for name in str(stats["pipeline"]).split("|")} - NO_TIERS
            through = any(_writes_through(self._config, name) for name in tiers)
            return PoolUse(int(stats["pool_bytes"]), leased, through, int(stats["pid"]))
        except BaseException as error:  # nothing is leased
            if not is_failure(error):
                raise
            self._counters.trouble("claim_error", f"the depot did not tell what is leased: {error!r}")
            return None

    def reaches_depot(self) -> bool:
        """Returns whether the attachment currently reaches a depot. Asks none."""
        depot = self._depot
        try:
            return depot is not None and bool(depot.attached)
        except BaseException as error:  # closed
            if not is_failure(error):
                raise
            return False

    def open(self, layout: Layout) -> None:
        """Opens a layout's store, so that later calls need not wait for it."""
        self._store(layout, 0)

    def prefetch(self, rows: Sequence[Row]) -> None:
        """Asks the depot to bring blocks from the tiers into the pool."""
        for layout, numbers in _by_layout(rows).items():
            store = self._store(layout, 0)
            if store is None:
                continue
            try:
                store.prefetch([rows[number][1] for number in numbers])
            except BaseException as error:  # only a hint
                if not is_failure(error):
                    raise
                self._counters.trouble("prefetch_error", f"a prefetch failed: {error!r}")

    def reset(self, layout: Layout) -> bool:
        """Makes all objects of this layout unreachable in all tiers, for all engines. Returns whether it worked."""
        store = self._store(layout, 0)
        if store is None:
            return False
        try:
            store.reset()
        except BaseException as error:  # the caller asks again
            if not is_failure(error):
                raise
            self._counters.trouble("reset_error", f"the depot did not confirm a reset: {error!r}")
            return False
        return True

    def attached(self) -> bool:
        """Returns whether every store currently reaches a depot; true before the first one is opened."""
        with self._lock:
            stores = [slot.store for slot in self._slots.values()]
        try:
            return all(store is not None and store.attached for store in stores)
        except BaseException as error:  # closed
            if not is_failure(error):
                raise
            return False

    def __len__(self) -> int:
        return len(self._slots)

    def close(self) -> None:
        """Waits for tasks in flight, at most their time limit, and detaches. Idempotent."""
        with self._lock:
            self._closed = True
            slots = list(self._slots.values())
        for slot in slots:
            with slot.lock:
                store, slot.store = slot.store, None
            if store is not None:
                self._end(store)
        with self._attaching:
            depot, self._depot = self._depot, None
        if depot is not None:
            self._end(depot)

    def _end(self, what: Any) -> None:
        try:
            what.close()
        except BaseException as error:  # the others are closed nevertheless
            if not is_failure(error):
                raise
            self._counters.trouble("close_error", f"a store or its depot was not closed: {error!r}")

    def _store(self, layout: Layout, blocks: int) -> Any:
        with self._lock:
            slot = self._slots.get(layout)
            if slot is None and len(self._slots) < LAYOUTS_MAX:
                slot = self._slots[layout] = _Slot()
        if slot is None:
            self._counters.trouble(
                "too_many_layouts",
                f"objects of {layout.model} are not stored: {LAYOUTS_MAX} layouts, the maximum, are open",
                blocks,
            )
            return None
        if slot.store is None:
            with slot.lock:
                self._open_once(layout, slot)
        if slot.store is None:
            self._counters.add("not_open", blocks)
        return slot.store

    def _open_once(self, layout: Layout, slot: _Slot) -> None:
        if slot.store is not None or self._closed or time.monotonic() < slot.again_s:
            return
        try:
            facts = self._facts(layout)
            with self._attaching:
                if self._depot is None:
                    self._depot = self._attach(self._config, block_bytes=layout.size_bytes)
                if not self._closed:
                    slot.store = self._depot.open(layout=[layout.size_bytes], namespace=facts)
        except BaseException as error:  # everything is a miss until it opens
            if not is_failure(error):
                raise
            slot.again_s = time.monotonic() + OPEN_AGAIN_S
            self._counters.trouble("open_error", f"no store for objects of {layout.model}: {error!r}")


def _writes_through(config: KVDepotConfig, tier: str) -> bool:
    """Returns whether a tier is to get every block at once: it has no daily limit of what is written, either."""
    name = tier.lower()
    when = getattr(config, f"{name}_write", "through")
    return bool(when == "through" and not getattr(config, f"{name}_write_gb_per_day", 0.0))


def _failed_lookups(store: Any) -> int:
    """Returns how many lookups of this process have failed at the store's depot."""
    return sum(store.stats()["failures"].get("lookup", {}).values())


def _by_layout(rows: Sequence[tuple[Any, ...]]) -> dict[Layout, list[int]]:
    numbers: dict[Layout, list[int]] = {}
    for number, row in enumerate(rows):
        numbers.setdefault(row[0], []).append(number)
    return numbers
