"""The storage plug-in below LMCache's own engine and storage manager, over a real depot (P1, P2, P6, P8, P10)."""

import asyncio
import inspect
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from chunks import until
from conftest import POOL_GB, settings
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from engine import CHUNK, OURS, SEED_004, configuration, engine, kv, metadata
from kvdepot.engines.lmcache import KVDepotBackend
from kvdepot.engines.lmcache.backend import GET_THREADS, PUT_THREADS
from kvdepot.engines.lmcache.keys import chunk_hash
from kvdepot.engines.lmcache.stores import Moved
from kvdepot.errors import ConfigError
from tools.lab.child import kill_process
from tools.lab.depot import Depot, DepotHome, depot_stats, wait_until_clean

TOKENS = list(range(4 * CHUNK + 10))
FULL = 4 * CHUNK
MEDIUM_BYTES = 64 << 20


@pytest.fixture(autouse=True)
def _same_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache's hashes are equal in all processes only with this."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


class Life:
    """LMCache's engine from its start to its end."""

    def __init__(
        self,
        file: Path,
        home: DepotHome,
        meta: dict[str, Any] | None = None,
        own: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        chosen = settings(home) if own is None else own
        self.engine = engine(configuration(file, chosen, **changes), metadata(**(meta or {})))
        self.manager = self.engine.storage_manager
        self.backend = self.manager.storage_backends["dax"]
        assert type(self.backend) is KVDepotBackend

    def store(self, tokens: list[int], values: torch.Tensor) -> None:
        before = self.held()
        self.engine.store(torch.tensor(tokens), kv=values)
        # Their memory is given back last.
        until(lambda: not self.backend._puts and self.held() == before, "stores")

    def retrieve(self, tokens: list[int]) -> tuple[int, torch.Tensor]:
        into = torch.zeros_like(kv(0, len(tokens)))
        found = self.engine.retrieve(torch.tensor(tokens), kv=into)
        return int(found.sum()), into

    def held(self) -> int:
        """Bytes of LMCache's memory that are in use."""
        allocator = self.manager.allocator_backend.memory_allocator
        return int(allocator.pin_allocator.total_allocated_size)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> "Life":
        return self

    def __exit__(self, *exc: object) -> None:
        # Its threads would keep a failing test from ending.
        self.close()


@pytest.fixture
def life(tmp_path: Path, home: DepotHome, depot: Depot) -> Iterator[Life]:
    with Life(tmp_path / "lmcache.yaml", home) as made:
        yield made


def test_methods_take_what_lmcache_passes() -> None:
    for name, theirs in inspect.getmembers(StoragePluginInterface, inspect.isfunction):
        ours = getattr(KVDepotBackend, name)
        if name != "__init__" and ours is not theirs:
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name


def test_kv_is_the_same_after_everything_was_restarted(tmp_path: Path, home: DepotHome) -> None:
    values = kv(1, len(TOKENS))
    with home.start() as depot:
        with Life(tmp_path / "lmcache.yaml", home) as first:
            assert first.engine.lookup(TOKENS) == 0
            first.store(TOKENS, values)
        depot.wait_until_clean(60)
    with home.start(), Life(tmp_path / "lmcache.yaml", home) as second:
        assert second.engine.lookup(TOKENS) == FULL
        found, into = second.retrieve(TOKENS)
        assert found == FULL
        assert torch.equal(into[:, :, :FULL], values[:, :, :FULL])
        assert second.engine.lookup([7, *TOKENS]) == 0


def test_the_keys_of_lmcaches_dax_backend_alone_run_a_depot_on_its_medium(tmp_path: Path, home: DepotHome) -> None:
    """Seed 004: the backend starts a depot on ``dax.device_path``, and finds its blocks again after a kill -9 of it."""
    medium, values = tmp_path / "medium", kv(4, len(TOKENS))
    with medium.open("wb") as file:
        file.truncate(MEDIUM_BYTES)
    own = {"socket": str(home.socket), "pool_gb": POOL_GB, "attach_timeout_ms": 60_000, "call_timeout_ms": 30_000}
    extra = {"dax.device_path": str(medium), "dax.max_dax_size": MEDIUM_BYTES / (1 << 30), "dax.restore_workers": 2}
    try:
        for turn in range(2):
            with Life(tmp_path / "lmcache.yaml", home, own=own, extra=extra) as life:
                if not turn:
                    assert life.engine.lookup(TOKENS) == 0
                    life.store(TOKENS, values)
                    wait_until_clean(home.socket, 60)
                until(lambda life=life: life.engine.lookup(TOKENS) == FULL, "the medium's blocks are known")
                found, into = life.retrieve(TOKENS)
                assert found == FULL
                assert torch.equal(into[:, :, :FULL], values[:, :, :FULL])
                stats = depot_stats(home.socket)
                assert stats is not None
                assert stats["pipeline"] == "Cache|Dax"
                assert [(tier["name"], tier["blocks"]) for tier in stats["tiers"]] == [("dax", FULL // CHUNK)]
                # Until it has ended it holds the medium.
                kill_process(stats["pid"])
    finally:
        if (stats := depot_stats(home.socket)) is not None:
            kill_process(stats["pid"])


def test_a_killed_depot_is_a_miss_and_comes_back_by_itself(tmp_path: Path, home: DepotHome) -> None:
    values = kv(2, len(TOKENS))
    with ExitStack() as stack:
        depot = stack.enter_context(home.start())
        life = stack.enter_context(Life(tmp_path / "lmcache.yaml", home))
        life.store(TOKENS, values)
        depot.wait_until_clean(60)
        held = life.held()
        depot.kill()
        assert life.engine.lookup(TOKENS) == 0
        assert life.retrieve(TOKENS)[0] == 0
        life.store([5, *TOKENS], values)
        assert life.held() == held
        assert life.backend.counts()["no_depot"] > 0
        stack.enter_context(home.start())
        until(lambda: life.engine.lookup(TOKENS) == FULL, "the backend finds the new depot")
        found, into = life.retrieve(TOKENS)
        assert found == FULL
        assert torch.equal(into[:, :, :FULL], values[:, :, :FULL])


@pytest.mark.parametrize(
    "meta",
    [{"model_name": "other"}, {"kv_dtype": torch.float16}, {"worker_id": 1, "world_size": 2}],
    ids=["model", "dtype", "rank"],
)
def test_other_facts_are_other_chunks(life: Life, tmp_path: Path, home: DepotHome, meta: dict[str, Any]) -> None:
    life.store(TOKENS, kv(3, len(TOKENS)))
    assert life.engine.lookup(TOKENS) == FULL
    with Life(tmp_path / "other.yaml", home, meta) as other:
        assert other.engine.lookup(TOKENS) == 0


def test_other_weights_at_the_same_path_are_another_namespace(tmp_path: Path, home: DepotHome) -> None:
    file = tmp_path / "model" / "model.safetensors"
    file.parent.mkdir()
    config = configuration(tmp_path / "lmcache.yaml", settings(home, attach_timeout_ms=1000))
    found = []
    for content in (b"\1", b"\1", b"\2"):
        file.write_bytes(content * 512)
        backend = KVDepotBackend(config, metadata(model_name=str(file.parent)))
        found.append(backend._facts(backend._layout()))
        backend.close()
    assert found[0] == found[1] != found[2]


def test_holes_stay_in_their_places_and_a_prefetch_returns_the_leading_run(life: Life) -> None:
    life.store(TOKENS, kv(4, len(TOKENS)))
    keys = [key for _, _, key in life.engine.token_database.process_tokens(TOKENS)][:4]
    held = life.held()
    assert life.backend.remove(keys[2])
    assert not life.backend.remove(keys[2])
    assert life.backend.batched_contains(keys) == 2
    found = life.backend.batched_get_blocking(keys)
    assert [one is not None for one in found] == [True, True, False, True]
    for one in found:
        if one is not None:
            one.ref_count_down()
    leading = asyncio.run(life.backend.batched_get_non_blocking("id", keys))
    assert len(leading) == 2
    for one in leading:
        one.ref_count_down()
    assert life.held() == held, "what comes after the hole is released"
    life.store(TOKENS, kv(4, len(TOKENS)))
    assert life.backend.batched_contains(keys) == 4


def test_memory_of_misses_is_given_back(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.store(TOKENS, kv(8, len(TOKENS)))
    keys = [key for _, _, key in life.engine.token_database.process_tokens([*TOKENS[:FULL], *range(CHUNK)])]
    cpu, given = life.manager.allocator_backend, []
    allocate = cpu.batched_allocate

    def watched(*args: Any, **kwargs: Any) -> Any:
        made = allocate(*args, **kwargs)
        given.extend(made)
        return made

    monkeypatch.setattr(cpu, "batched_allocate", watched)
    found = life.backend.batched_get_blocking(keys)
    assert [one is not None for one in found] == [True] * 4 + [False]
    assert [one.get_ref_count() for one in given] == [1] * 4 + [0]
    assert asyncio.run(life.backend.batched_get_non_blocking("id", [*keys[4:], *keys[:4]])) == []
    assert [one.get_ref_count() for one in given[5:]] == [0] * 5
    for one in found[:4]:
        one.ref_count_down()


PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
"""What a panic of the core is in Python."""


def panic(*_: Any, **__: Any) -> Any:
    raise PANIC("index out of bounds")


def test_a_panic_of_the_core_is_a_miss(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.store(TOKENS, kv(16, len(TOKENS)))
    keys = [key for _, _, key in life.engine.token_database.process_tokens(TOKENS)][:4]
    monkeypatch.setattr(life.backend, "_layout", panic)
    assert life.backend.batched_contains(keys) == 0
    assert life.backend.batched_get_blocking(keys) == [None] * 4
    assert asyncio.run(life.backend.batched_get_non_blocking("id", keys)) == []
    life.store(list(range(CHUNK)), kv(17, CHUNK))
    counts = life.backend.counts()
    assert (counts["lookup_error"], counts["load_error"], counts["dump_error"]) == (4, 8, 1)


def test_memory_that_may_still_be_copied_is_not_given_back(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.store(TOKENS, kv(16, len(TOKENS)))
    keys = [key for _, _, key in life.engine.token_database.process_tokens(TOKENS)][:2]
    held = life.held()
    # The last object's task does not tell whether it has ended.
    monkeypatch.setattr(
        life.backend._stores,
        "move",
        lambda _, places: Moved([False] * len(places), [False] * len(places), [*[False] * (len(places) - 1), True]),
    )
    assert life.backend.batched_get_blocking(keys) == [None, None]
    one = life.held() - held
    assert one > 0
    objects = life.manager.allocator_backend.batched_allocate(
        metadata().get_shapes(), metadata().get_dtypes(), 2, MemoryFormat.KV_2LTD
    )
    for future in life.backend.batched_submit_put_task(keys, objects) or []:
        future.result()
    assert [memory.get_ref_count() for memory in objects] == [1, 2]
    for memory in objects:
        memory.ref_count_down()
    assert life.held() == held + 2 * one


def test_what_is_being_stored_already_is_not_counted_as_left_out(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.engines.lmcache.backend.PUTS_MAX", 2)
    gate = threading.Event()
    for _ in range(PUT_THREADS):
        life.backend._put_threads.submit(gate.wait, 60)
    keys = [CacheEngineKey("model", 1, 0, number, torch.bfloat16) for number in range(3)]
    objects = life.manager.allocator_backend.batched_allocate(
        metadata().get_shapes(), metadata().get_dtypes(), 3, MemoryFormat.KV_2LTD
    )
    futures = life.backend.batched_submit_put_task(keys[:2], objects[:2]) or []
    assert life.backend.batched_submit_put_task(keys, objects) is None
    gate.set()
    for future in futures:
        future.result()
    for memory in objects:
        memory.ref_count_down()
    assert life.backend.counts()["put_not_begun"] == 1


def test_clear_is_for_everybody_and_waits_for_the_depot(tmp_path: Path, home: DepotHome) -> None:
    with ExitStack() as stack:
        depot = stack.enter_context(home.start())
        one, other = (stack.enter_context(Life(tmp_path / f"{name}.yaml", home)) for name in ("one", "other"))
        one.store(TOKENS, kv(5, len(TOKENS)))
        assert other.engine.lookup(TOKENS) == FULL
        depot.wait_until_clean(60)
        depot.kill()
        one.manager.clear(["dax"])
        assert one.engine.lookup(TOKENS) == 0
        stack.enter_context(home.start())
        until(one.backend._stores.attached, "the depot is back")
        until(one.backend._clearing.settled, "the reset")
        assert one.engine.lookup(TOKENS) == 0
        assert other.engine.lookup(TOKENS) == 0
        one.store(TOKENS, kv(6, len(TOKENS)))
        assert one.engine.lookup(TOKENS) == FULL


def test_a_store_that_waits_during_a_clear_is_dropped(life: Life) -> None:
    gate = threading.Event()
    for _ in range(PUT_THREADS):
        life.backend._put_threads.submit(gate.wait, 60)
    life.engine.store(torch.tensor(TOKENS), kv=kv(9, len(TOKENS)))
    life.manager.clear(["dax"])
    gate.set()
    until(lambda: not life.backend._puts, "stores")
    assert life.engine.lookup(TOKENS) == 0
    life.store(TOKENS, kv(10, len(TOKENS)))
    assert life.engine.lookup(TOKENS) == FULL


def test_a_store_under_way_during_a_clear_is_not_found(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """The depot puts a chunk into the epoch that is current when its space is reserved: here, the new one."""
    begun, gate = threading.Event(), threading.Event()
    move = life.backend._stores.move

    def held(verb: Any, places: Any) -> Any:
        begun.set()
        assert gate.wait(60)
        return move(verb, places)

    with monkeypatch.context() as patch:
        patch.setattr(life.backend._stores, "move", held)
        life.engine.store(torch.tensor(TOKENS), kv=kv(11, len(TOKENS)))
        assert begun.wait(60)
        life.manager.clear(["dax"])
        assert life.engine.lookup(TOKENS) == 0
        gate.set()
        until(lambda: not life.backend._puts, "stores")
    until(life.backend._clearing.settled, "the second reset")
    assert life.backend.counts()["dumped"] == FULL // CHUNK
    keys = [key for _, _, key in life.engine.token_database.process_tokens(TOKENS)][:4]
    rows = [(life.backend._layout(), chunk_hash(key)) for key in keys]
    assert life.backend._stores.lookup(rows) == [False] * 4, "nobody else finds them, either"
    assert life.engine.lookup(TOKENS) == 0
    life.store(TOKENS, kv(12, len(TOKENS)))
    assert life.engine.lookup(TOKENS) == FULL


def test_a_clear_during_a_reset_is_confirmed_by_its_own(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    reset = life.backend._stores.reset

    def overtaken(layout: Any) -> bool:
        sent.append("reset")
        if len(sent) == 1:
            life.backend.clear()  # its reset fails
            return reset(layout)
        return len(sent) > 2 and reset(layout)

    monkeypatch.setattr(life.backend._stores, "reset", overtaken)
    life.backend.clear()
    until(life.backend._clearing.settled, "the reset")
    assert len(sent) == 3


def test_a_load_during_a_clear_is_a_miss(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.store(TOKENS, kv(13, len(TOKENS)))
    move = life.backend._stores.move

    def overtaken(verb: Any, places: Any) -> Any:
        ended = move(verb, places)
        life.backend.clear()
        return ended

    monkeypatch.setattr(life.backend._stores, "move", overtaken)
    assert life.retrieve(TOKENS)[0] == 0
    assert life.backend.counts()["loaded"] > 0


def test_a_scheduler_opens_its_store_before_the_first_lookup(
    tmp_path: Path, home: DepotHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    monkeypatch.setattr("kvdepot.engines.lmcache.backend.Stores.open", lambda *_: opened.set())
    backend = KVDepotBackend(config=configuration(tmp_path / "lmcache.yaml", settings(home)), metadata=metadata())
    found = opened.wait(60)
    backend.close()
    assert found


def test_loads_that_hang_hold_up_no_lookup(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.store(TOKENS, kv(14, len(TOKENS)))
    keys = [key for _, _, key in life.engine.token_database.process_tokens(TOKENS)][:4]
    gate = threading.Event()
    move = life.backend._stores.move

    def held(verb: Any, places: Any) -> Any:
        assert gate.wait(60)
        return move(verb, places)

    monkeypatch.setattr(life.backend._stores, "move", held)

    async def ask() -> tuple[int, int]:
        loads = [
            asyncio.create_task(life.backend.batched_get_non_blocking("id", keys[:1])) for _ in range(GET_THREADS + 1)
        ]
        await asyncio.sleep(0)
        try:
            hits = await asyncio.wait_for(life.backend.batched_async_contains("id", keys), 50)
        finally:
            gate.set()
        found = [one for load in loads for one in await load]
        for one in found:
            one.ref_count_down()
        return hits, len(found)

    assert asyncio.run(ask()) == (4, GET_THREADS + 1)


def test_stores_that_wait_at_the_end_are_dropped(life: Life) -> None:
    held = life.held()
    for _ in range(PUT_THREADS):
        life.backend._put_threads.submit(until, lambda: life.backend._closed, "the end")
    life.engine.store(torch.tensor(TOKENS), kv=kv(15, len(TOKENS)))
    life.backend.close()
    counts = life.backend.counts()
    assert (counts.get("dumped", 0), counts.get("put_not_begun", 0)) == (0, FULL // CHUNK)
    assert life.held() == held


def test_only_full_chunks_of_this_model_are_stored(life: Life) -> None:
    cpu = life.manager.allocator_backend
    key = CacheEngineKey("model", 1, 0, 77, torch.bfloat16)
    part = cpu.allocate([torch.Size([2, 4, 10, 64])], [torch.bfloat16], MemoryFormat.KV_2LTD)
    for future in life.backend.batched_submit_put_task([key], [part]) or []:
        future.result()
    assert not life.backend.contains(key)
    assert life.backend.counts()["other_layout"] == 1
    part.ref_count_down()


def test_callbacks_name_what_was_stored(life: Life) -> None:
    cpu, told = life.manager.allocator_backend, []
    keys = [CacheEngineKey("model", 1, 0, number, torch.bfloat16) for number in range(2)]
    shapes = metadata().get_shapes()
    good = cpu.allocate(shapes, [torch.bfloat16], MemoryFormat.KV_2LTD)
    bad = cpu.allocate(shapes, [torch.bfloat16], MemoryFormat.KV_T2D)
    futures = life.backend.batched_submit_put_task(keys, [good, bad], on_complete_callback=told.append)
    for future in futures:
        future.result()
    assert told == keys[:1]
    assert good.get_ref_count() == bad.get_ref_count() == 1
    good.ref_count_down()
    bad.ref_count_down()


def test_no_memory_for_a_load_is_a_miss(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.store(TOKENS, kv(7, len(TOKENS)))
    monkeypatch.setattr("kvdepot.engines.lmcache.backend.ALLOCATE_S", 0.0)
    cpu = life.manager.allocator_backend
    monkeypatch.setattr(cpu, "allocate", lambda *_, **__: None)
    monkeypatch.setattr(cpu, "batched_allocate", lambda *_, **__: None)
    assert life.retrieve(TOKENS)[0] == 0
    assert life.backend.counts()["no_memory"] > 0


def test_memory_is_given_back_if_a_later_allocation_fails(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    life.store(TOKENS, kv(8, len(TOKENS)))
    held, cpu = life.held(), life.manager.allocator_backend
    whole = cpu.batched_allocate

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of pinned memory")

    monkeypatch.setattr(
        cpu, "batched_allocate", lambda shapes, dtypes, _, *rest, **more: whole(shapes, dtypes, 1, *rest, **more)
    )
    monkeypatch.setattr(cpu, "allocate", broken)
    found, _ = life.retrieve(TOKENS)
    assert found in (0, CHUNK)
    assert life.backend.counts()["allocate_error"] > 0
    assert life.held() == held


@pytest.mark.parametrize(
    ("changes", "extra", "says"),
    [
        ({"use_layerwise": True}, {}, "use_layerwise"),
        ({}, {"kvdepot.no_such_key": 1}, "no_such_key"),
        ({}, {"dax.no_such_key": 1}, "dax.no_such_key"),
    ],
)
def test_what_is_not_served_is_refused(
    tmp_path: Path, home: DepotHome, changes: dict[str, Any], extra: dict[str, Any], says: str
) -> None:
    config = configuration(tmp_path / "lmcache.yaml", settings(home), **changes)
    config.extra_config |= extra
    with pytest.raises(ConfigError, match=says):
        KVDepotBackend(config=config, metadata=metadata())


def test_plain_bytes_of_an_undeclared_format_are_refused(tmp_path: Path, home: DepotHome) -> None:
    config = configuration(tmp_path / "lmcache.yaml", settings(home, attach_timeout_ms=1))
    with pytest.raises(ConfigError, match="weights_version: missing"):
        KVDepotBackend(config=config, metadata=metadata(kv_dtype=torch.uint8))
    config.extra_config["kvdepot.weights_version"] = "v1-fp8_e4m3"
    KVDepotBackend(config=config, metadata=metadata(kv_dtype=torch.uint8)).close()


def test_the_document_changes_by_two_values() -> None:
    assert all(name in SEED_004 for name in OURS)
