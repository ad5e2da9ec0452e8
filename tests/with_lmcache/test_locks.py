"""What a lookup of LMCache's server found can be loaded, whatever the depot evicts in between (P1, P2)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chunks import END_S, SIZE, Driver, desc, key, until
from conftest import settings

from kvdepot.engines.lmcache import KVDepotL2Adapter, locker
from kvdepot.engines.lmcache.locker import HELD_PART, Locker
from tools.lab.depot import Depot, DepotHome

POOL_GB = 0.0625
POOL = int(POOL_GB * (1 << 30))
NUMBERS = list(range(32))
WHOLE = dict.fromkeys(NUMBERS, "whole")
MISSES = dict.fromkeys(NUMBERS, "miss")
BATCH = 1024
TASK_MS = 300_000
"""Longer than a test: so long a lease lasts."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that is late leases less, and leases end, but here the machine is busy and leases are counted."""
    for limit in ("OPEN_S", "ARRIVE_S"):
        monkeypatch.setattr(locker, limit, END_S)
    monkeypatch.setattr(locker, "LEASE_S", TASK_MS / 1000)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[dict[str, Any], Depot]]:
    with DepotHome(tmp_path / "small", {"pipeline": "Cache", "pool_gb": POOL_GB, "directories": None}) as home:
        chosen = settings(home, pipeline="Cache", pool_gb=POOL_GB, directories=None, timeout_ms=TASK_MS)
        with home.start() as depot:
            yield {name: value for name, value in chosen.items() if value is not None}, depot


@pytest.fixture
def driver(small: tuple[dict[str, Any], Depot]) -> Iterator[Driver]:
    params, _ = small
    adapter = KVDepotL2Adapter(params)
    yield Driver(adapter)
    adapter.close()


@pytest.fixture
def depot(small: tuple[dict[str, Any], Depot]) -> Depot:
    return small[1]


def evict(driver: Driver) -> None:
    """Stores twice as much as the pool holds."""
    for begin in range(0, 2 * POOL // SIZE, BATCH):
        driver.store(range(10_000 + begin, 10_000 + begin + BATCH))


def leased(depot: Depot) -> int:
    stats = depot.stats()
    assert stats is not None
    return int(stats["pool_leased_bytes"])


@pytest.mark.parametrize("locks", [True, False])
def test_what_was_found_can_be_loaded_after_the_depot_has_evicted(
    driver: Driver, depot: Depot, monkeypatch: pytest.MonkeyPatch, *, locks: bool
) -> None:
    if not locks:  # As it was without: what follows is due to the locks.
        monkeypatch.setattr(Locker, "lock", lambda *_: None)
    driver.store(NUMBERS)
    assert driver.lookup(NUMBERS) == NUMBERS
    assert leased(depot) == (len(NUMBERS) * SIZE if locks else 0)
    evict(driver)
    assert driver.load(NUMBERS) == (WHOLE if locks else MISSES)
    until(lambda: leased(depot) == 0, "the release")
    evict(driver)
    assert driver.lookup(NUMBERS) == []


def test_each_request_unlocks_for_itself(driver: Driver, depot: Depot) -> None:
    driver.store(NUMBERS)
    for _ in range(3):
        assert driver.lookup(NUMBERS) == NUMBERS
    assert driver.load(NUMBERS) == WHOLE
    driver.unlock(NUMBERS)
    evict(driver)
    assert driver.load(NUMBERS, unlock=False) == WHOLE
    until(lambda: leased(depot) == 0, "the release after the last load")
    driver.unlock(NUMBERS)
    assert driver.adapter.report_status()["locked"] == 0


def test_unlocks_deletions_and_the_end_release(driver: Driver, depot: Depot) -> None:
    driver.store(NUMBERS)
    driver.lookup(NUMBERS)
    driver.unlock(NUMBERS)
    until(lambda: leased(depot) == 0, "the release after an unlock")
    driver.lookup(NUMBERS)
    driver.adapter.delete([key(number) for number in NUMBERS])
    until(lambda: leased(depot) == 0, "the release after a deletion")
    assert driver.load(NUMBERS) == MISSES
    driver.store(NUMBERS)
    driver.lookup(NUMBERS)
    assert leased(depot) > 0
    driver.adapter.close()
    until(lambda: leased(depot) == 0, "the release at the end")


def test_what_exceeds_the_locks_part_of_the_pool_is_found_without_a_lease(driver: Driver, depot: Depot) -> None:
    many = list(range(POOL // SIZE // 2))
    driver.store(many)
    assert driver.lookup(many) == many
    assert 0 < leased(depot) <= POOL // HELD_PART
    evict(driver)
    loaded = driver.load(many)
    status = driver.adapter.report_status()
    assert [number for number, outcome in loaded.items() if outcome == "whole"] == many[: status["counts"]["leased"]]
    assert "wrong" not in loaded.values()
    assert (status["locked"], status["claims"]) == (0, 0)


def test_the_first_chunks_of_all_ranks_are_leased(driver: Driver, depot: Depot) -> None:
    """LMCache loads a chunk only if all ranks have it."""
    many = range(POOL // SIZE // 4)
    keys = [key(number, kv_rank=rank) for rank in (1, 2) for number in many]
    for rank in (1, 2):
        driver.store(many, kv_rank=rank)
    task = driver.adapter.submit_lookup_and_lock_task(keys, {0: desc()})
    until(lambda: driver.adapter.query_lookup_and_lock_result(task) is not None, "the lookup")
    evict(driver)
    outcomes = [driver.load(many, kv_rank=rank) for rank in (1, 2)]
    assert outcomes[0] == outcomes[1]
    assert list(outcomes[0].values()).count("whole") == len(many) // 2
