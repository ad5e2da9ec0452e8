"""The L2 adapter with LMCache's own keys, objects and listeners, over a real depot (P1, P2, P6, P8, P10)."""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from chunks import DTYPE, SHAPE, SIZE, Driver, Memory, content, desc, judge, key, until
from conftest import POOL_GB, settings
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig, _create_plugin_adapter

import kvdepot
from kvdepot.engines.lmcache import KVDepotL2Adapter
from kvdepot.engines.lmcache.stores import Moved
from kvdepot.errors import ConfigError
from kvdepot.task import TaskResult
from tools.lab.depot import Depot, DepotHome
from tools.lab.pause import paused
from tools.wire.servers import Server

NUMBERS = list(range(8))
MANY = list(range(512))
WHOLE = dict.fromkeys(NUMBERS, "whole")
MISSES = dict.fromkeys(NUMBERS, "miss")
DAX_BYTES = 64 << 20


class Account(L2AdapterListener):
    """LMCache's view of what is stored."""

    def __init__(self) -> None:
        self.stored: list[Any] = []
        self.deleted: list[Any] = []
        self.accessed: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        assert sizes == [SIZE] * len(keys)
        self.stored += keys

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        self.deleted += keys


@pytest.fixture
def account(adapter: Any) -> Account:
    made = Account()
    adapter.register_listener(made)
    return made


def test_lmcache_makes_the_adapter_from_its_own_configuration(home: DepotHome) -> None:
    config = PluginL2AdapterConfig.from_dict(
        {
            "module_path": "kvdepot.engines.lmcache",
            "class_name": "KVDepotL2Adapter",
            "adapter_params": settings(home, attach_timeout_ms=1),
        }
    )
    made = _create_plugin_adapter(config)
    fds = {made.get_store_event_fd(), made.get_lookup_and_lock_event_fd(), made.get_load_event_fd()}
    assert len(fds) == 3
    made.close()
    made.close()


def test_methods_take_what_lmcache_passes() -> None:
    for name, theirs in inspect.getmembers(L2AdapterInterface, inspect.isfunction):
        ours = getattr(KVDepotL2Adapter, name)
        if name != "__init__" and ours is not theirs:
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name


@pytest.mark.parametrize("params", [{"no_such_key": 1}, {"mode": "embedded"}, {"config": "f", "pool_gb": 1}])
def test_a_wrong_key_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        KVDepotL2Adapter(params)


@pytest.fixture
def medium(home: DepotHome, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Keys of a depot with this tier, whose medium outlives it: files, a file, or a server with a pool of its own."""
    tier = request.param
    if tier == "Slab":
        yield {"slab_path": str(home.blocks / "slab"), "slab_capacity_gb": 0.125, "slab_segment_mb": 8}
    elif tier == "Dax":
        file = home.blocks / "medium"
        with file.open("wb") as made:
            made.truncate(DAX_BYTES)
        yield {"dax_device_path": str(file)}
    elif tier == "Remote":
        with Server("kvdepot") as server:
            # Silence of a server that is alive: a busy machine must not reach it.
            yield {"remote_servers": [server.address], "remote_timeout_ms": 60_000}
    else:
        yield {"directories": [str(home.blocks)]}


@pytest.mark.parametrize(
    ("medium", "tier"), [(tier, tier) for tier in ("Posix", "Slab", "Dax", "Remote")], indirect=["medium"]
)
def test_objects_come_back_whole_also_after_everything_was_restarted(
    home: DepotHome, medium: dict[str, Any], tier: str
) -> None:
    home.configure({"pool_gb": POOL_GB, "pipeline": f"Cache|{tier}", "directories": None, **medium})
    with home.start() as depot:
        first = KVDepotL2Adapter(settings(home))
        stored = Driver(first).store(NUMBERS)
        assert (stored.is_successful(), stored.bytes_transferred()) == (True, SIZE * len(NUMBERS))
        first.close()
        depot.wait_until_clean(60)
    with home.start() as depot:
        second = KVDepotL2Adapter(settings(home))
        driver = Driver(second)
        # Nothing was stored in this process: the layout of objects is known from the lookup alone. A tier may still be
        # reading what its medium has.
        until(lambda: driver.lookup([*NUMBERS, 99]) == NUMBERS, "everything is found")
        assert driver.load([*NUMBERS, 99]) == {**WHOLE, 99: "miss"}
        assert (depot.stats() or {})["pipeline"] == f"Cache|{tier}"
        second.close()


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "somebody"},
        {"kv_rank": 1},
        {"object_group_id": 1},
        {"model_name": "model2"},
    ],
    ids=lambda one: next(iter(one)),
)
def test_other_keys_are_other_objects(driver: Driver, other: dict[str, Any]) -> None:
    driver.store(NUMBERS)
    assert driver.lookup(NUMBERS, **other) == []
    assert driver.load(NUMBERS, **other) == MISSES
    assert driver.load(NUMBERS) == WHOLE


@pytest.mark.parametrize("layout", [desc((2, 4, 64, 16)), desc(dtype=torch.float16)], ids=["shape", "dtype"])
def test_objects_of_the_same_length_and_another_layout_are_other_objects(driver: Driver, layout: Any) -> None:
    driver.store(NUMBERS)
    assert driver.lookup(NUMBERS, layout=layout) == []
    memory = Memory(layout.shapes[0], layout.dtypes[0])
    task = driver.adapter.submit_load_task([key(0)], [memory.object])
    until(lambda: (found := driver.adapter.query_load_result(task)) is not None and found.popcount() == 0, "the load")


def test_another_weights_version_is_another_namespace(home: DepotHome, driver: Driver) -> None:
    driver.store(NUMBERS)
    other = KVDepotL2Adapter(settings(home, weights_version="2"))
    assert Driver(other).lookup(NUMBERS) == []
    other.close()


def test_other_weights_at_the_same_path_are_another_namespace(home: DepotHome, depot: Depot, tmp_path: Path) -> None:
    model, file = str(tmp_path / "model"), tmp_path / "model" / "model.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"\1" * 512)
    with ExitStack() as stack:

        def started() -> Driver:
            adapter = KVDepotL2Adapter(settings(home))
            stack.callback(adapter.close)
            return Driver(adapter)

        assert started().store(NUMBERS, model_name=model).is_successful()
        assert started().lookup(NUMBERS, model_name=model) == NUMBERS
        file.write_bytes(b"\2" * 512)
        retrained = started()
        assert retrained.lookup(NUMBERS, model_name=model) == []
        assert retrained.load(NUMBERS, model_name=model) == MISSES


def test_a_killed_depot_is_a_miss_and_comes_back_by_itself(home: DepotHome) -> None:
    with home.start() as depot:
        adapter = KVDepotL2Adapter(settings(home))
        driver = Driver(adapter)
        driver.store(NUMBERS)
        depot.wait_until_clean(60)
        depot.kill()
        assert driver.lookup(NUMBERS) == []
        assert driver.load(NUMBERS) == MISSES
        assert not driver.store([9]).is_successful()
        status = adapter.report_status()
        assert status["is_healthy"]
        assert not status["attached"]
        assert status["counts"]["no_depot"] > 0
    with home.start():
        until(lambda: adapter.report_status()["attached"], "the adapter finds the new depot")
        assert driver.lookup(NUMBERS) == NUMBERS
        assert driver.load(NUMBERS) == WHOLE
        assert driver.store([9]).is_successful()
        adapter.close()


def test_a_depot_killed_amid_loads_and_stores_gives_whole_objects_or_misses(home: DepotHome) -> None:
    with home.start() as depot:
        adapter = KVDepotL2Adapter(settings(home))
        Driver(adapter).store(MANY)
        depot.wait_until_clean(60)
    seen: set[str] = set()
    for kill_after in (1, 4, 8):
        with home.start() as depot:
            until(lambda: adapter.report_status()["attached"], "the adapter finds the new depot")
            loads, stores = [], []
            for begin in range(0, len(MANY), len(MANY) // 8):
                part = MANY[begin : begin + len(MANY) // 8]
                memories = [Memory() for _ in part]
                keys, objects = [key(number) for number in part], [one.object for one in memories]
                loads.append((adapter.submit_load_task(keys, objects), part, memories))
                fresh = [Memory(fill=content(number)) for number in part]
                keys = [key(number, cache_salt=str(kill_after)) for number in part]
                stores.append((adapter.submit_store_task(keys, [one.object for one in fresh]), fresh))
                if len(loads) == kill_after:
                    depot.kill()
            wait_for_stores(adapter, len(stores))
            for task, part, memories in loads:
                loaded = taken(adapter, task)
                assert all(memory.guarded for memory in memories)
                seen |= {judge(memories[index], part[index]) for index in loaded}
    assert seen <= {"whole"}
    # Everything reported as stored is found, complete, and nothing else is wrong.
    with home.start():
        until(lambda: adapter.report_status()["attached"], "the adapter finds the new depot")
        for kill_after in (1, 4, 8):
            assert set(Driver(adapter).load(MANY, cache_salt=str(kill_after)).values()) <= {"whole", "miss"}
        assert set(Driver(adapter).load(MANY).values()) == {"whole"}
        adapter.close()


def test_a_depot_that_hangs_is_a_miss_in_bounded_time(home: DepotHome) -> None:
    with home.start() as depot:
        adapter = KVDepotL2Adapter(settings(home, timeout_ms=1000, call_timeout_ms=100))
        driver = Driver(adapter)
        until(lambda: driver.store(NUMBERS).is_successful(), "a store")
        with paused(depot.pid):
            assert driver.lookup(NUMBERS) == []
            assert driver.load(NUMBERS) == MISSES
            assert not driver.store([9]).is_successful()
        until(lambda: driver.lookup(NUMBERS) == NUMBERS, "the depot answers again")
        until(lambda: driver.load(NUMBERS) == WHOLE, "it is read again")
        adapter.close()


def wait_for_stores(adapter: Any, count: int) -> None:
    ended: dict[int, Any] = {}
    until(lambda: ended.update(adapter.pop_completed_store_tasks()) or len(ended) == count, "stores")


def taken(adapter: Any, task: int) -> list[int]:
    """Returns the result of a load that has ended."""
    found: list[Any] = []
    until(lambda: found.append(adapter.query_load_result(task)) or found[-1] is not None, "a load")
    return found[-1].get_indices_list()


def test_without_a_depot_everything_is_a_miss(home: DepotHome) -> None:
    adapter = KVDepotL2Adapter(settings(home, attach_timeout_ms=1))
    driver = Driver(adapter)
    assert not driver.store(NUMBERS).is_successful()
    assert driver.lookup(NUMBERS) == []
    assert driver.load(NUMBERS) == MISSES
    adapter.close()


def test_what_is_deleted_is_a_miss_until_it_is_stored_again(driver: Driver, account: Account) -> None:
    driver.store(NUMBERS)
    assert account.stored == [key(number) for number in NUMBERS]
    driver.adapter.delete([key(3)])
    rest = [number for number in NUMBERS if number != 3]
    assert driver.lookup(NUMBERS) == rest
    assert driver.load(NUMBERS) == {**WHOLE, 3: "miss"}
    assert account.deleted == [key(3)]
    assert driver.adapter.get_usage().total_bytes_used == SIZE * len(rest)
    driver.store([3])
    assert driver.lookup(NUMBERS) == NUMBERS
    assert driver.load(NUMBERS) == WHOLE
    assert driver.adapter.get_usage().total_bytes_used == SIZE * len(NUMBERS)


def test_what_is_deleted_stays_a_miss_when_it_could_not_be_stored_again(home: DepotHome) -> None:
    with ExitStack() as stack:
        depot = stack.enter_context(home.start())
        adapter = KVDepotL2Adapter(settings(home))
        stack.callback(adapter.close)
        driver = Driver(adapter)
        driver.store(NUMBERS)
        depot.wait_until_clean(60)
        adapter.delete([key(3)])
        depot.kill()
        assert not driver.store([3]).is_successful()
        stack.enter_context(home.start())
        until(lambda: adapter.report_status()["attached"], "the adapter finds the new depot")
        assert driver.load(NUMBERS) == {**WHOLE, 3: "miss"}
        assert driver.store([3]).is_successful()
        assert driver.load(NUMBERS) == WHOLE


def test_what_is_stored_twice_counts_once(driver: Driver, account: Account) -> None:
    driver.store(NUMBERS, cache_salt="one")
    driver.store(NUMBERS, cache_salt="one")
    assert driver.adapter.get_usage().bytes_by_cache_salt == {"one": SIZE * len(NUMBERS)}
    driver.load(NUMBERS, cache_salt="one")
    assert account.accessed == [key(number, cache_salt="one") for number in NUMBERS]


def test_lmcache_learns_what_the_depot_has_evicted_but_not_that_it_is_away(tmp_path: Any) -> None:
    with DepotHome(tmp_path / "small", {"pipeline": "Cache", "pool_gb": 0.0625, "directories": None}) as home:
        chosen = settings(home, pipeline="Cache", pool_gb=0.0625, directories=None)
        params = {name: value for name, value in chosen.items() if value is not None}
        with home.start() as depot:
            adapter = KVDepotL2Adapter(params)
            account, driver = Account(), Driver(adapter)
            adapter.register_listener(account)
            # Twice what the pool holds.
            many = list(range(8192))
            for begin in range(0, len(many), 512):
                driver.store(many[begin : begin + 512])
            found = driver.lookup(many)
            assert 0 < len(found) < len(many)
            assert {*account.deleted} == {key(number) for number in set(many) - set(found)} & {*account.stored}
            told = len(account.deleted)
            depot.kill()
            assert driver.lookup(many) == []
            assert len(account.deleted) == told
            adapter.close()


def lookups_fail(patch: pytest.MonkeyPatch) -> None:
    """Makes lookups fail as they do if a depot that is attached refuses a connection: nothing is found."""
    stats, failed = kvdepot.Store.stats, [0]

    def lookup(store: Any, hashes: list[bytes]) -> Any:
        failed[0] += 1
        return np.zeros(len(hashes), dtype=bool)

    patch.setattr(kvdepot.Store, "lookup", lookup)
    patch.setattr(kvdepot.Store, "stats", lambda store: stats(store) | {"failures": {"lookup": {"busy": failed[0]}}})


def loads_fail(patch: pytest.MonkeyPatch, kind: str) -> None:
    """Makes every load fail with this kind, without a copy."""

    def load(store: Any, hashes: list[bytes], addresses: Any) -> Any:
        result = TaskResult(np.arange(len(hashes)), {kind: len(hashes)})
        return SimpleNamespace(wait_done=lambda: True, result=lambda: result)

    patch.setattr(kvdepot.Store, "load", load)


def test_lmcache_is_not_told_that_an_object_is_gone_because_a_call_failed(
    driver: Driver, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.store(NUMBERS)
    with monkeypatch.context() as patch:
        lookups_fail(patch)
        assert driver.lookup(NUMBERS) == []
    # `not_found` may also be a block that a tier did not read in time, so it is looked up.
    for kind in ("timeout", "busy", "no_space", "unavailable", "not_found"):
        with monkeypatch.context() as patch:
            loads_fail(patch, kind)
            assert driver.load(NUMBERS) == MISSES
    assert account.deleted == []
    assert driver.adapter.get_usage().total_bytes_used == SIZE * len(NUMBERS)
    assert driver.load(NUMBERS) == WHOLE


def test_the_same_tokens_of_another_model_are_another_object(driver: Driver, account: Account) -> None:
    """Two models with one vocabulary, behind one server: their keys differ by the model alone."""
    driver.store(NUMBERS)
    assert driver.lookup(NUMBERS, model_name="model2") == []
    assert account.deleted == [], "they were never stored"
    driver.store(NUMBERS, model_name="model2")
    assert driver.adapter.get_usage().total_bytes_used == 2 * SIZE * len(NUMBERS)
    driver.adapter.delete([key(3, model_name="model2")])
    assert account.deleted == [key(3, model_name="model2")]
    assert driver.lookup(NUMBERS) == NUMBERS
    assert driver.load(NUMBERS) == WHOLE
    assert driver.load(NUMBERS, model_name="model2") == {**WHOLE, 3: "miss"}


def test_lmcache_is_told_of_an_object_whose_load_finds_it_gone(driver: Driver, account: Account) -> None:
    driver.store(NUMBERS)
    (slot,) = driver.adapter._stores._slots.values()
    slot.store.reset()
    assert driver.load(NUMBERS) == MISSES
    assert account.deleted == [key(number) for number in NUMBERS]
    assert driver.adapter.get_usage().total_bytes_used == 0


def test_an_object_that_cannot_be_named_is_not_stored(driver: Driver) -> None:
    memory = Memory(fill=content(0))
    memory.object.set_used_size(SIZE // 2)
    assert not driver.store_objects([key(0)], [memory.object]).is_successful()
    assert not driver.store_objects([key(0, model_name="")], [Memory(fill=content(0)).object]).is_successful()
    assert not driver.store_objects([key(0), key(1)], [Memory(fill=content(0)).object]).is_successful()
    assert driver.adapter.report_status()["counts"]["unknown_object"] == 2
    assert driver.lookup([0]) == []


def test_a_lookup_without_a_layout_is_a_miss_until_one_is_known(driver: Driver) -> None:
    empty = desc((0,))
    assert driver.lookup(NUMBERS, layout=empty) == []
    driver.store(NUMBERS)
    assert driver.lookup(NUMBERS, layout=empty) == NUMBERS


def test_objects_of_many_tensors_are_one_block(driver: Driver) -> None:
    shapes, dtypes = [SHAPE, torch.Size([3, 5])], [DTYPE, torch.float32]
    size = SIZE + 60
    made = []
    for fill in (content(0, size), None):
        memory = Memory((size,), torch.uint8, fill)
        memory.object.meta.shapes, memory.object.meta.dtypes = shapes, dtypes
        made.append(memory)
    assert driver.store_objects([key(0)], [made[0].object]).is_successful()
    task = driver.adapter.submit_load_task([key(0)], [made[1].object])
    until(lambda: driver.adapter.query_load_result(task) is not None, "the load")
    assert torch.equal(made[0].bytes, made[1].bytes)


def test_tasks_after_the_end_are_misses(adapter: Any, depot: Depot) -> None:
    driver = Driver(adapter)
    driver.store(NUMBERS)
    adapter.close()
    task = adapter.submit_load_task([key(0)], [Memory().object])
    assert adapter.query_load_result(task).popcount() == 0
    task = adapter.submit_store_task([key(0)], [Memory().object])
    assert not adapter.pop_completed_store_tasks()[task].is_successful()


def test_lmcache_gets_no_result_while_its_memory_may_be_copied(
    driver: Driver, adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would reuse the memory."""
    driver.store(NUMBERS)
    monkeypatch.setattr(adapter._stores, "move", lambda *_: Moved([False], [False], [True]))
    task = adapter.submit_load_task([key(0)], [Memory().object])
    adapter.submit_store_task([key(0)], [Memory().object])

    def both_are_over() -> bool:
        counts = adapter.report_status()["counts"]
        return (counts.get("load_never_ends"), counts.get("store_never_ends")) == (1, 1)

    until(both_are_over, "both tasks")
    adapter.close()
    assert adapter.query_load_result(task) is None
    assert adapter.pop_completed_store_tasks() == {}
