"""Locks of LMCache's lookups: which leases end when, how many there may be, and that they hold what a lookup found."""

import importlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvdepot
from kvdepot.config import load_config
from kvdepot.engines.lmcache import locker as lmcache_locker
from kvdepot.engines.lmcache import locks as lmcache_locks
from kvdepot.engines.lmcache.counters import Counters
from kvdepot.engines.lmcache.facts import Layout
from kvdepot.engines.lmcache.keys import object_label
from kvdepot.engines.lmcache.locker import HAD_MAX, HELD_PART, LEASE_S, Locker
from kvdepot.engines.lmcache.locks import CLAIM_OBJECTS, Locks, plan
from kvdepot.engines.lmcache.stores import PoolUse, Row, Stores
from tests.python.node import NodeDepot

END_S = 60.0
SIZE = 64 << 10


class Type:
    """The part of torch's dtype that is used."""

    itemsize = 2

    def __str__(self) -> str:
        return "torch.bfloat16"


LAYOUT = Layout.of("m", [(SIZE // 2,)], [Type()])


class Claim:
    """A claim of as many objects as its depot has, which may have to be settled first."""

    def __init__(self, units: int = 1, *, settled: bool = True, arriving: int | None = None) -> None:
        self.units, self.settled, self.comes = units, settled, arriving
        self.released = 0

    def poll(self) -> tuple[bool, int, int]:
        return self.settled, self.units if self.settled else 0, 0

    def wait(self, timeout_ms: int) -> tuple[bool, int, int]:
        time.sleep(timeout_ms / 1000)
        return self.poll()

    def arriving(self) -> tuple[int, int, int, int, int] | None:
        return None if self.comes is None else (self.comes, 0, 0, 0, 0)

    def settle(self) -> tuple[bool, int, int]:
        self.settled = True
        return self.poll()

    def release(self) -> None:
        self.released += 1


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def test_a_claim_ends_with_the_last_of_its_objects() -> None:
    locks, claim = Locks(10), Claim()
    assert locks.lock(names(1, 2, 3), claim, 30, 0) == []
    assert (len(locks), locks.claims, locks.size) == (3, 1, 30)
    assert locks.loaded(names(1)) == []
    assert locks.delete(names(2)) == []
    assert locks.unlock(names(1, 2)) == []
    assert locks.unlock(names(3)) == [claim]
    assert (len(locks), locks.claims, locks.size) == (0, 0, 0)
    assert locks.unlock(names(1, 2, 3)) == locks.loaded(names(1)) == locks.delete(names(1)) == []


def test_what_two_requests_have_locked_is_held_until_both_have_unlocked() -> None:
    locks, first, second = Locks(10), Claim(), Claim()
    locks.lock(names(1), first, 10, 0)
    locks.lock(names(1), second, 10, 0)
    assert locks.unlock(names(1)) == [first]
    assert locks.unlock(names(1)) == [second]


def test_a_load_and_its_unlock_end_one_lock() -> None:
    """LMCache unlocks what it has loaded. If that counted twice, it would end the other request's lease."""
    locks, first, second = Locks(10), Claim(), Claim()
    locks.lock(names(1), first, 10, 0)
    locks.lock(names(1), second, 10, 0)
    assert locks.loaded(names(1)) == [first]
    assert locks.unlock(names(1)) == []
    assert (len(locks), locks.claims) == (1, 1)
    assert locks.loaded(names(1)) == [second]
    assert locks.unlock(names(1)) == []
    assert len(locks) == 0


def test_a_request_without_a_lease_does_not_end_that_of_another() -> None:
    locks, claim = Locks(10), Claim()
    locks.lock(names(1), claim, 10, 0)
    locks.lock(names(1), None, 0, 0)
    assert locks.loaded(names(1)) == []
    assert locks.unlock(names(1)) == []
    assert locks.unlock(names(1)) == [claim]


def test_an_object_that_was_deleted_is_held_for_nobody_and_still_unlocked() -> None:
    locks, first, second, again = Locks(10), Claim(), Claim(), Claim()
    locks.lock(names(1), first, 10, 0)
    locks.lock(names(1), second, 10, 0)
    assert locks.delete(names(1, 1)) == [first, second]
    locks.lock(names(1), again, 10, 0)
    assert locks.unlock(names(1, 1)) == []
    assert locks.unlock(names(1)) == [again]


def test_locks_that_nobody_ends_expire() -> None:
    locks, first, second = Locks(10), Claim(), Claim()
    locks.lock(names(1), first, 10, 0)
    locks.lock(names(1, 2), second, 20, 5)
    assert locks.expire(9.9) == []
    assert locks.expire(10) == [first]
    assert (len(locks), locks.claims, locks.size) == (2, 1, 20)
    assert locks.clear() == [second]
    assert (len(locks), locks.claims, locks.size) == (0, 0, 0)


def test_locks_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_locks, "LOCKS_MAX", 3)
    locks, first, second = Locks(10), Claim(), Claim()
    assert locks.lock(names(1, 2), first, 10, 0) == []
    assert locks.lock(names(3, 4), second, 10, 0) == [second], "it is given back"
    assert locks.lock(names(3), second, 10, 0) == []


def test_a_request_whose_lock_has_expired_does_not_end_the_lease_of_another() -> None:
    """A load may wait longer than its lease, and is unlocked nevertheless."""
    locks, first, second = Locks(10), Claim(), Claim()
    locks.lock(names(1), first, 10, 0)
    assert locks.expire(10) == [first]
    locks.lock(names(1), second, 10, 11)
    assert locks.loaded(names(1)) == []
    assert locks.unlock(names(1)) == []
    assert (len(locks), locks.claims) == (1, 1)
    assert locks.loaded(names(1)) == [second]
    assert locks.unlock(names(1)) == []
    assert len(locks) == len(locks._debts) == 0


def test_an_expired_lock_is_unlocked_once_even_if_it_is_not_loaded() -> None:
    locks, held, again = Locks(10), Claim(), Claim()
    locks.lock(names(1, 2, 3), Claim(), 10, 0)
    locks.loaded(names(2))
    locks.expire(10)
    locks.delete(names(3))
    locks.lock(names(1, 2), held, 10, 11)
    locks.lock(names(3), again, 10, 11)
    assert locks.loaded(names(3)) == [again], "it was deleted, so the first request does not load it"
    assert locks.unlock(names(1, 2, 3)) == []
    assert locks.unlock(names(1, 2, 3)) == [held]
    assert len(locks) == len(locks._debts) == 0


def test_what_exceeds_the_locks_does_not_end_the_lease_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_locks, "LOCKS_MAX", 1)
    locks, first, second = Locks(10), Claim(), Claim()
    locks.lock(names(1), first, 10, 0)
    assert locks.lock(names(1), second, 10, 0) == [second]
    assert locks.loaded(names(1)) == []
    assert locks.unlock(names(1)) == []
    assert locks.loaded(names(1)) == [first]
    locks.unlock(names(1))
    assert len(locks) == len(locks._debts) == 0


def test_a_lock_that_was_abandoned_lets_one_later_lease_expire_and_no_more() -> None:
    locks, first, second = Locks(10), Claim(), Claim()
    locks.lock(names(1), Claim(), 10, 0)
    locks.expire(10)
    locks.lock(names(1), first, 10, 11)
    assert locks.loaded(names(1)) == locks.unlock(names(1)) == [], "it may have been the request of the expired lock"
    assert locks.expire(21) == [first]
    locks.lock(names(1), second, 10, 22)
    assert locks.loaded(names(1)) == [second]


def test_expired_locks_that_are_remembered_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_locks, "DEBTS_MAX", 2)
    locks = Locks(10)
    for number in range(5):
        locks.lock(names(number), None, 0, number)
        locks.expire(99)
    assert list(locks._debts) == names(3, 4)
    locks.clear()
    assert not locks._debts


def test_claims_that_are_lost_leave_locks_without_a_lease() -> None:
    locks, first, second = Locks(10), Claim(), Claim()
    locks.lock(names(1, 2), first, 20, 0)
    assert locks.lose() == [first]
    assert locks.lose() == []
    assert (len(locks), locks.claims, locks.size) == (2, 0, 0)
    locks.lock(names(1), second, 10, 0)
    assert locks.loaded(names(1)) == locks.unlock(names(1)) == []
    assert locks.unlock(names(1)) == [second]


def test_what_was_unlocked_is_forgotten() -> None:
    locks = Locks(10)
    locks.lock(names(1), Claim(), 10, 0)
    locks.lock(names(2), Claim(), 10, 0)
    locks.unlock(names(2))
    locks.unlock(names(1))
    assert not locks._grants
    assert not locks._of


def test_objects_of_one_layout_are_claimed_together() -> None:
    sizes = [("a", 4), ("b", 8)] * (CLAIM_OBJECTS + 1)
    planned = plan(sizes, 1 << 20, 99)
    assert [len(indexes) for indexes in planned] == [CLAIM_OBJECTS, CLAIM_OBJECTS, 1, 1]
    assert sorted(index for indexes in planned for index in indexes) == list(range(len(sizes)))
    assert all(len({sizes[index] for index in indexes}) == 1 for indexes in planned)
    assert plan(sizes, 20, 99) == [[0, 2], [1]], "what does not fit, and all after it, is left out"
    assert plan(sizes, 20, 1) == [[0, 2]]
    assert plan(sizes, 20, 0) == plan(sizes, 3, 99) == plan(sizes, -1, 99) == []


@dataclass
class Depot:
    """Stores whose depot has everything, and leases what is claimed."""

    size: int = 4 * HELD_PART * CLAIM_OBJECTS * SIZE
    writes_through: bool = False
    claims: list[tuple[Claim, list[bytes]]] = field(default_factory=list)
    make: Any = Claim
    others: int = 0
    answers: bool = True
    reached: bool = True
    pid: int = 1

    def pool_use(self) -> PoolUse | None:
        held = sum(len(wanted) for claim, wanted in self.claims if not claim.released)
        used = held * SIZE + self.others
        return PoolUse(self.size, used, self.writes_through, self.pid) if self.answers else None

    def reaches_depot(self) -> bool:
        return self.reached

    def claim(self, layout: Layout, wanted: Sequence[bytes]) -> Any:
        made = self.make(len(wanted))
        if made is not None:
            self.claims.append((made, list(wanted)))
        return made

    def held(self) -> int:
        return sum(not claim.released for claim, _ in self.claims)


def rows(count: int, begin: int = 0) -> list[Row]:
    return [(LAYOUT, number.to_bytes(16, "little")) for number in range(begin, begin + count)]


def labels(of: Sequence[Row]) -> list[bytes]:
    return [object_label(layout.model, name) for layout, name in of]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that is late leases less, but here the machine is busy and leases are counted.

    Leases end with the time limit of a load, which is as long as ``LEASE_S`` where no real depot is used.
    """
    monkeypatch.setattr(lmcache_locker, "OPEN_S", END_S)
    monkeypatch.setattr(lmcache_locker, "LEASE_S", 10 * END_S)


@pytest.fixture
def depot() -> Depot:
    return Depot()


@pytest.fixture
def counts() -> Counters:
    return Counters()


@pytest.fixture
def locker(depot: Depot, counts: Counters) -> Iterator[Locker]:
    made = Locker(depot, counts, 30_000)  # type: ignore[arg-type]
    yield made
    made.close()
    assert depot.held() == 0


def until(condition: Any) -> None:
    end_s = time.monotonic() + END_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def test_a_lookup_holds_what_it_found(locker: Locker, depot: Depot, counts: Counters) -> None:
    found = rows(CLAIM_OBJECTS + 2)
    locker.lock([])
    locker.lock(found)
    assert [len(wanted) for _, wanted in depot.claims] == [CLAIM_OBJECTS, 2]
    assert locker.report() == {"locked": len(found), "claims": 2, "leased_bytes": len(found) * SIZE}
    locker.loaded(labels(found[:CLAIM_OBJECTS]))
    until(lambda: depot.held() == 1)
    locker.unlock(labels(found))
    until(lambda: depot.held() == 0)
    assert locker.report() == {"locked": 0, "claims": 0, "leased_bytes": 0}
    assert counts.snapshot() == {"leased": len(found)}


def test_a_deletion_and_the_end_release(locker: Locker, depot: Depot) -> None:
    locker.lock(rows(1))
    locker.lock(rows(1, 1))
    locker.delete(labels(rows(1)))
    until(lambda: depot.held() == 1)
    locker.close()
    locker.close()
    assert depot.held() == 0
    locker.lock(rows(1, 2))
    assert depot.held() == 0
    assert locker.report() == {"locked": 0, "claims": 0, "leased_bytes": 0}


def test_locks_hold_a_part_of_the_pool(locker: Locker, depot: Depot, counts: Counters) -> None:
    fits = depot.size // HELD_PART // SIZE
    locker.lock(rows(fits + 5))
    assert sum(len(wanted) for _, wanted in depot.claims) == fits
    locker.lock(rows(3, 1000))
    assert counts.snapshot() == {"leased": fits, "not_leased": 8}
    assert locker.report()["locked"] == fits + 8, "what is not leased is unlocked as well"


def test_what_others_lease_counts(locker: Locker, depot: Depot) -> None:
    depot.others = depot.size // HELD_PART - 2 * SIZE
    locker.lock(rows(5))
    assert [len(wanted) for _, wanted in depot.claims] == [2]


def test_claims_at_the_same_time_are_given_back(locker: Locker, depot: Depot, counts: Counters) -> None:
    room = depot.size // HELD_PART

    def make(units: int) -> Claim:
        # Another engine leases all but the first claim, after it was asked how much is free.
        depot.others = room - CLAIM_OBJECTS * SIZE
        return Claim(units)

    depot.make = make
    locker.lock(rows(3 * CLAIM_OBJECTS))
    until(lambda: depot.held() == 1)
    assert not depot.claims[0][0].released
    assert counts.snapshot() == {"leased": CLAIM_OBJECTS, "not_leased": 2 * CLAIM_OBJECTS}


def test_claims_are_limited(locker: Locker, depot: Depot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_locker, "CLAIMS_MAX", 2)
    for number in range(4):
        locker.lock(rows(1, number))
    assert depot.held() == 2
    locker.unlock(labels(rows(1)))
    locker.lock(rows(1, 9))
    until(lambda: depot.held() == 2)


def test_locks_that_nobody_ends_make_room(locker: Locker, depot: Depot, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    locker.lock(rows(4 * CLAIM_OBJECTS))
    assert depot.held() == 4
    now_s += LEASE_S
    depot.others = -4 * CLAIM_OBJECTS * SIZE  # released by a thread, which may not have begun
    locker.lock(rows(1, 1000))
    assert locker.report()["locked"] == 1
    monkeypatch.undo()
    until(lambda: depot.held() == 1)


@pytest.mark.parametrize("call", ["a lookup without hits", "an unlock", "a report"])
def test_leases_expire_whatever_lmcache_calls(
    locker: Locker, depot: Depot, counts: Counters, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    locker.lock(rows(1))
    now_s += LEASE_S
    if call == "a lookup without hits":
        locker.lock([])
    elif call == "an unlock":
        locker.unlock(labels(rows(1, 1)))
    else:
        assert locker.report() == {"locked": 0, "claims": 0, "leased_bytes": 0}
    monkeypatch.undo()
    until(lambda: depot.held() == 0)
    assert counts.snapshot() == {"leased": 1, "leases_expired": 1}


@pytest.mark.parametrize("pid", [1, 2])
def test_leases_end_with_the_depot_that_held_them(locker: Locker, depot: Depot, counts: Counters, pid: int) -> None:
    locker.lock(rows(CLAIM_OBJECTS + 1))
    if pid == 1:
        depot.reached = False
        assert locker.report() == {"locked": CLAIM_OBJECTS + 1, "claims": 0, "leased_bytes": 0}
        depot.reached = True
    depot.pid = pid
    locker.lock(rows(1, 1000))
    assert locker.report() == {"locked": CLAIM_OBJECTS + 2, "claims": 1, "leased_bytes": SIZE}
    assert counts.snapshot() == {"leased": CLAIM_OBJECTS + 2, "leases_lost": 2}
    locker.unlock(labels(rows(CLAIM_OBJECTS + 1)))
    until(lambda: depot.held() == 1)


@pytest.mark.parametrize("make", [lambda units: None, lambda units: Claim(0), lambda units: object()])
def test_a_claim_that_fails_is_no_lease(locker: Locker, depot: Depot, make: Any) -> None:
    depot.make = make
    depot.pool_use = lambda: PoolUse(1 << 30, 0, False, 1)  # type: ignore[method-assign]
    locker.lock(rows(3))
    assert locker.report() == {"locked": 3, "claims": 0, "leased_bytes": 0}
    depot.claims.clear()


def test_a_depot_that_does_not_tell_its_size_leases_nothing(locker: Locker, depot: Depot) -> None:
    depot.answers = False
    locker.lock(rows(3))
    assert not depot.claims
    assert locker.report()["locked"] == 3


def test_a_lookup_does_not_wait_for_claims(locker: Locker, depot: Depot) -> None:
    """A claim that waits for room takes what there is, so that it does not stand in the way of others."""
    waiting = Claim(1, settled=False)
    coming = Claim(2, settled=False, arriving=2)
    made = iter([coming, waiting])
    depot.make = lambda units: next(made)
    began_s = time.monotonic()
    locker.lock(rows(2))
    locker.lock(rows(2, 2))
    assert time.monotonic() - began_s < END_S
    assert (coming.settled, waiting.settled) == (False, True)
    assert locker.report() == {"locked": 4, "claims": 2, "leased_bytes": 3 * SIZE}


def test_a_depot_that_is_slow_is_asked_for_a_while_only(
    locker: Locker, depot: Depot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache_locker, "OPEN_S", 0.0)
    locker.lock(rows(3))
    assert not depot.claims


def test_nothing_is_read_from_a_tier_that_lmcache_has_itself(locker: Locker, depot: Depot) -> None:
    depot.writes_through = True
    locker.had(labels(rows(1))[0])
    locker.lock(rows(3))
    assert [wanted for _, wanted in depot.claims] == [[name for _, name in rows(2, 1)]]
    depot.writes_through = False
    locker.lock(rows(1))
    assert depot.held() == 2
    assert len(locker._had) <= HAD_MAX


def test_unlocks_never_wait_for_the_depot(locker: Locker, depot: Depot) -> None:
    gate = threading.Event()
    caller = threading.get_ident()
    threads: list[int] = []

    def release() -> None:
        threads.append(threading.get_ident())
        if threads[-1] != caller:
            gate.wait(END_S)

    for begin in range(3):
        locker.lock(rows(1, begin))
        depot.claims[-1][0].release = release  # type: ignore[method-assign]
    for begin, end in enumerate((locker.unlock, locker.loaded, locker.delete)):
        end(labels(rows(1, begin)))
    assert locker.report()["claims"] == 0
    gate.set()
    locker.close()
    assert len(threads) == 3
    assert caller not in threads
    depot.claims.clear()


@pytest.mark.parametrize(
    ("settings", "through"),
    [
        ({"pipeline": "Cache"}, False),
        ({"pipeline": "Cache|Posix"}, True),
        ({"pipeline": "Cache|Posix", "posix_write": "when_cold"}, False),
        ({"pipeline": "Cache|Posix", "posix_write": "on_second_use"}, False),
        ({"pipeline": "Cache|Posix", "posix_write_gb_per_day": 1.0}, False),
        ({"pipeline": "Cache|Slab|Posix", "slab_write": "when_cold"}, True),
        ({"pipeline": "Cache|Slab|Posix", "slab_write": "when_cold", "posix_write": "on_demotion"}, False),
    ],
)
def test_only_a_tier_that_gets_everything_at_once_makes_up_for_a_lease(
    tmp_path: Path, settings: dict[str, Any], through: bool
) -> None:
    tiers: dict[str, Any] = {"directories": [str(tmp_path)]} if "Posix" in settings["pipeline"] else {}
    tiers |= {"slab_path": str(tmp_path / "slab"), "slab_capacity_gb": 1.0} if "Slab" in settings["pipeline"] else {}
    config = load_config({"pool_gb": 0.1, "mode": "node", **tiers, **settings}, owns_pool=False)
    told = {"pool_bytes": 8, "pool_leased_bytes": 2, "pool_fetching_bytes": 1, "pid": 7, "pipeline": config.pipeline}
    attachment = SimpleNamespace(
        attached=True, stats=lambda: {"depot": told}, open=lambda **_: SimpleNamespace(attached=True)
    )
    stores = Stores(config, lambda one: {}, Counters(), lambda config, *, block_bytes: attachment)
    assert not stores.reaches_depot()
    stores.open(LAYOUT)
    assert stores.pool_use() == PoolUse(8, 3, through, 7)
    assert stores.reaches_depot()
    del attachment.attached
    assert not stores.reaches_depot()


@pytest.fixture
def adapter_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The adapter's module over the parts of LMCache that it imports, which need not be installed."""

    class Bitmap(set[int]):
        def __init__(self, size: int) -> None:
            super().__init__()

        set = set.add

    parts: dict[str, dict[str, Any]] = {
        "lmcache_native": {"Bitmap": Bitmap},
        "v1.distributed.internal_api": {"L2StoreResult": object},
        "v1.distributed.l2_adapters.base": {"L2AdapterInterface": object},
    }
    for name, members in parts.items():
        steps = f"lmcache.{name}".split(".")
        for depth in range(1, len(steps)):
            monkeypatch.setitem(sys.modules, ".".join(steps[:depth]), ModuleType(steps[0]))
        made = ModuleType(name)
        made.__dict__.update(members)
        monkeypatch.setitem(sys.modules, f"lmcache.{name}", made)
    own = "kvdepot.engines.lmcache.adapter"
    monkeypatch.setitem(sys.modules, own, ModuleType(own))
    del sys.modules[own]
    made = importlib.import_module(own)
    monkeypatch.setattr(made, "lmcache_version", lambda: "0")
    return made


def test_a_lookup_that_fails_locks_nothing(adapter_module: Any, depot: Depot) -> None:
    """LMCache's listeners may raise. It takes the lookup for a miss then, so it would never unlock."""
    adapter = adapter_module.KVDepotL2Adapter({"pipeline": "Cache", "pool_gb": 0.1})
    adapter._locker._stores = adapter._stores = depot
    depot.lookup = lambda of: [number % 2 == 0 for number in range(len(of))]  # type: ignore[attr-defined]
    depot.gone = lambda of: [True] * len(of)  # type: ignore[attr-defined]
    depot.attached = depot.__len__ = depot.close = lambda: 0  # type: ignore[attr-defined]
    keys = [
        SimpleNamespace(model_name="m", kv_rank=0, object_group_id=0, cache_salt="", chunk_hash=bytes([number]) * 32)
        for number in range(4)
    ]
    descs = {0: SimpleNamespace(shapes=[(SIZE // 2,)], dtypes=[Type()])}
    for number, name in adapter._names(keys):
        adapter._announced.put(object_label(keys[number].model_name, name), SIZE)

    def fail(*_: Any) -> None:
        raise RuntimeError("a listener")

    adapter._notify_keys_deleted = fail
    with pytest.raises(RuntimeError, match="a listener"):
        adapter._look_up(keys, descs)
    assert adapter._locker.report()["locked"] == 0
    adapter._notify_keys_deleted = lambda *_: None
    assert adapter._look_up(keys, descs) == {0, 2}
    assert adapter._locker.report()["locked"] == 2
    adapter.close()
    assert depot.held() == 0


def test_stores_that_cannot_claim_do_not_raise() -> None:
    class Attachment:
        def open(self, **_: Any) -> Any:
            return SimpleNamespace(attached=True)

        def claim(self, *_: Any) -> Any:
            raise OSError("claim")

        def stats(self) -> Any:
            return {"depot": {"pool_bytes": 1}}

    config = load_config({"pool_gb": 0.1, "mode": "node"}, owns_pool=False)
    counts = Counters()
    made = Stores(config, lambda one: {}, counts, lambda config, *, block_bytes: Attachment())
    assert made.pool_use() is None
    made.open(LAYOUT)
    assert made.claim(LAYOUT, [b"k"]) is None
    assert made.pool_use() is None
    assert counts.snapshot() == {"claim_error": 3}
    assert len(counts.snapshot()) == 1


class Engine:
    """Objects in memory of this process, over stores and locks on a real depot, as the adapter uses them."""

    def __init__(self, node: NodeDepot) -> None:
        config = load_config(node.config, owns_pool=False)
        counts = Counters()
        self.stores = Stores(config, lambda one: {"model": one.model}, counts)
        self.locker = Locker(self.stores, counts, config.timeout_ms)

    def bytes_of(self, of: Sequence[Row]) -> np.ndarray:
        return np.stack([np.full(SIZE, int.from_bytes(name, "little") % 251, np.uint8) for _, name in of])

    def store(self, of: Sequence[Row]) -> None:
        memory = self.bytes_of(of)
        assert all(self.stores.move("dump", self.places(of, memory)).done)

    def load(self, of: Sequence[Row]) -> int:
        """Returns how many objects came, all of them with the right bytes."""
        memory = np.zeros((len(of), SIZE), np.uint8)
        done = self.stores.move("load", self.places(of, memory)).done
        self.locker.loaded(labels(of))
        assert np.array_equal(memory[done], self.bytes_of(of)[done])
        return sum(done)

    def fill(self, times: int = 3) -> None:
        """Stores several times as much as the pool holds."""
        count = times * int(0.0625 * (1 << 30)) // SIZE
        for begin in range(0, count, 256):
            self.store(rows(256, 10_000 + begin))
            # A tier may be slower, and what it has not written stays in the pool.
            assert self.stores._depot.drain(60_000)

    def places(self, of: Sequence[Row], memory: np.ndarray) -> list[tuple[Layout, bytes, int]]:
        return [(*row, memory[number].ctypes.data) for number, row in enumerate(of)]

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.stores._depot.stats()["depot"]
        return found

    def close(self) -> None:
        self.locker.close()
        self.stores.close()


@contextmanager
def running(node: NodeDepot) -> Iterator[NodeDepot]:
    with kvdepot.attach(node.config, block_bytes=SIZE) as started:
        node.pid = started.stats()["depot"]["pid"]
        yield node
    node.kill()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeDepot]:
    with running(NodeDepot(tmp_path)) as made:
        yield made


@pytest.mark.parametrize("locked", [True, False])
def test_what_a_lookup_found_can_be_loaded_after_the_pool_has_evicted(node: NodeDepot, *, locked: bool) -> None:
    engine = Engine(node)
    found = rows(64)
    engine.store(found)
    assert engine.stores.lookup(found) == [True] * len(found)
    if locked:
        engine.locker.lock(found)
        assert engine.stats()["pool_leased_bytes"] == len(found) * SIZE
    engine.fill()
    assert engine.load(found) == (len(found) if locked else 0)
    engine.locker.unlock(labels(found))
    until(lambda: engine.stats()["pool_leased_bytes"] == 0)
    engine.fill()
    assert not any(engine.stores.lookup(found)), "nothing is held any more"
    engine.close()


def test_the_second_of_two_requests_still_loads(node: NodeDepot) -> None:
    engine = Engine(node)
    found = rows(32)
    engine.store(found)
    engine.locker.lock(found)
    engine.locker.lock(found)
    assert engine.load(found) == len(found)
    engine.locker.unlock(labels(found))
    engine.fill()
    assert engine.load(found) == len(found)
    engine.locker.unlock(labels(found))
    until(lambda: engine.stats()["pool_leased_bytes"] == 0)
    engine.close()


def test_a_depot_that_was_killed_holds_nothing(node: NodeDepot) -> None:
    engine = Engine(node)
    found = rows(32)
    engine.store(found)
    engine.locker.lock(found)
    assert engine.locker.report()["claims"] == 2
    node.kill()
    node.pid = 0
    until(lambda: engine.locker.report() == {"locked": len(found), "claims": 0, "leased_bytes": 0})
    engine.close()


def test_locks_leave_room_to_store_and_end_with_their_process(node: NodeDepot) -> None:
    engine, other = Engine(node), Engine(node)
    found = rows(900)  # 90% of the pool
    for begin in range(0, len(found), 100):
        engine.store(found[begin : begin + 100])
    there = [row for row, has in zip(found, engine.stores.lookup(found), strict=True) if has]
    engine.locker.lock(there)
    stats = engine.stats()
    assert 0 < stats["pool_leased_bytes"] <= stats["pool_bytes"] // HELD_PART
    engine.fill()
    other.stores.open(LAYOUT)
    engine.close()
    until(lambda: other.stats()["pool_leased_bytes"] == 0)
    other.close()


def test_what_only_a_tier_has_is_brought_into_the_pool_unless_lmcache_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache_locker, "ARRIVE_S", END_S)
    node = NodeDepot(tmp_path)
    slab = {"slab_path": str(tmp_path / "slab"), "slab_capacity_gb": 0.25, "slab_segment_mb": 8, "slab_durable": False}
    node.config |= {"pipeline": "Cache|Slab", **slab}
    with running(node):
        engine, other = Engine(node), Engine(node)
        found = rows(32)
        engine.store(found)
        engine.fill(times=1)
        for label in labels(found):
            engine.locker.had(label)
        assert all(engine.stores.lookup(found))
        engine.locker.lock(found)
        stats = engine.stats()
        assert stats["pool_leased_bytes"] == stats["pool_fetching_bytes"] == stats["fetch_blocks"] == 0
        assert all(other.stores.lookup(found))
        other.locker.lock(found)
        until(lambda: engine.stats()["pool_leased_bytes"] == len(found) * SIZE)
        assert engine.stats()["fetch_blocks"] == len(found)
        assert other.load(found) == len(found)
        until(lambda: engine.stats()["pool_leased_bytes"] == 0)
        engine.close()
        other.close()


def test_a_depot_that_hangs_leases_nothing_in_bounded_time(node: NodeDepot) -> None:
    # Calls of the first one may take as long as a busy machine needs.
    patient = Engine(node)
    node.config = {**node.config, "call_timeout_ms": 20}
    engine = Engine(node)
    found = rows(64)
    patient.store(found)
    engine.stores.open(LAYOUT)

    def held_up_s() -> float:
        until(engine.stores.reaches_depot)
        with node.stopped():
            began_s = time.monotonic()
            engine.locker.lock(found)
            held_s = time.monotonic() - began_s
            assert engine.locker.report() == {"locked": len(found), "claims": 0, "leased_bytes": 0}
            engine.locker.unlock(labels(found))
        return held_s

    # This machine may stand still during one try.
    assert any(held_up_s() < END_S / 10 for _ in range(3))
    engine.close()
    patient.close()
