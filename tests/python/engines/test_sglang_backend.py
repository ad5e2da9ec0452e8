"""SGLang's storage backend over the test's own depot, with stand-ins for pools and configuration."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from node import NodeDepot
from sglang_parts import (
    IndexerPoolHost,
    LogicalPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    Model,
    Storage,
    Tensor,
    Transfer,
    names,
)

from kvdepot.config import load_config
from kvdepot.engines.clearing import UNSETTLED
from kvdepot.engines.counters import Counters
from kvdepot.engines.sglang import KVDepotHiCache, engine, leases, room
from kvdepot.engines.sglang.pages import Pages
from kvdepot.engines.sglang.room import Room
from kvdepot.errors import ConfigError
from kvdepot.task import TaskResult
from tools.lab.pause import paused

UNTIL_S = 60.0
Open = Callable[..., KVDepotHiCache]


def until(done: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + UNTIL_S
    while not done():
        assert time.monotonic() < end_s, f"not after {UNTIL_S:.0f} s: {what}"
        time.sleep(0.02)


class Home(NodeDepot):
    """A depot that the first backend starts, with a disk below its pool."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        blocks = directory / "blocks"
        blocks.mkdir()
        self.config |= {"pipeline": "Cache|Posix", "directories": [str(blocks)]}

    def found(self, backend: KVDepotHiCache) -> None:
        """Waits until a depot answers, and remembers its process."""
        end_s = time.monotonic() + UNTIL_S
        # Asked once for each look: with a short time limit the next call may not be answered.
        while not (pid := depot_pid(backend)):
            assert time.monotonic() < end_s, "no depot answers"
            time.sleep(0.02)
        self.pid = pid


def depot_pid(backend: KVDepotHiCache) -> int:
    """Returns the process of the depot that answers; 0 if none does."""
    return int(backend._room._depot.stats().get("depot", {}).get("pid", 0))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    # A call must end before SGLang's own deadline, and a hit is held for a while; here all may be as slow as they like.
    monkeypatch.setitem(Room.__init__.__kwdefaults__, "call_s", UNTIL_S)
    monkeypatch.setitem(Room.hold.__kwdefaults__, "wait_s", UNTIL_S)
    monkeypatch.setattr(leases, "LEASE_S", 10 * UNTIL_S)
    made = Home(tmp_path)
    yield made
    made.kill()


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """State of the running SGLang."""
    told = SimpleNamespace(arguments=Model(tmp_path / "model").make())
    monkeypatch.setattr(engine, "server_arguments", lambda: told.arguments)
    monkeypatch.setattr(engine, "sglang_version", lambda: "0.5.23")
    monkeypatch.setattr(engine, "hashes_know_adapters", lambda: True)
    return told


@pytest.fixture
def opened(home: Home, says: SimpleNamespace) -> Iterator[Open]:
    """Creates backends of SGLang's ranks, each with its pool, and closes them."""
    made: list[KVDepotHiCache] = []

    def open_backend(pool: Any, **fields: Any) -> KVDepotHiCache:
        extra = {"interface_v1": 1, **home.config, **fields.pop("extra", {})}
        backend = KVDepotHiCache(Storage(extra, **fields), {})
        made.append(backend)
        backend.register_mem_pool_host(pool)
        if not home.pid:
            home.found(backend)
        return backend

    yield open_backend
    for one in made:
        one.close()


@pytest.mark.parametrize("kind", [MHATokenToKVPoolHost, MLATokenToKVPoolHost])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_come_back_in_every_layout(opened: Open, kind: Any, layout: str) -> None:
    pool = kind(layout)
    pool.fill()
    backend, keys = opened(pool), names(3)
    before = [pool.page(number).tobytes() for number in (1, 2, 3)]
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys, pool.indices(1, 2, 3)) == [True] * 3
    pool.buffer[:] = 0
    assert backend.batch_exists(keys) == 3
    # Into other pages, in another order.
    assert backend.batch_get_v1(keys, pool.indices(9, 8, 2)) == [True] * 3
    assert [pool.page(number).tobytes() for number in (9, 8, 2)] == before
    assert backend.counts()["hit"] == 3
    assert backend._room.held() == 0


def test_layouts_of_equal_bytes_share_pages(opened: Open) -> None:
    pools = [MHATokenToKVPoolHost(layout) for layout in ("layer_first", "page_first_direct", "page_first")]
    writer, reader, stranger = (opened(pool) for pool in pools)
    pools[0].fill()
    assert writer.batch_set_v1(names(2), pools[0].indices(0, 1)) == [True, True]
    assert reader.batch_get_v1(names(2), pools[1].indices(4, 5)) == [True, True]
    assert [pools[1].page(page).tobytes() for page in (4, 5)] == [pools[0].page(page).tobytes() for page in (0, 1)]
    assert stranger.batch_exists(names(2)) == 0


def test_only_what_leads_is_a_hit(opened: Open) -> None:
    pool = MHATokenToKVPoolHost()
    backend, keys = opened(pool), names(5)
    backend.batch_set_v1([keys[0], keys[1], keys[3]], pool.indices(0, 1, 3))
    assert backend.batch_exists(keys) == 2
    assert [backend.exists(key) for key in keys] == [True, True, False, True, False]
    assert backend.batch_get_v1(keys, pool.indices(0, 1, 2, 3, 4)) == [True, True, False, True, False]
    assert backend.counts()["load_not_found"] == 2


def test_models_ranks_and_tenants_find_nothing_of_each_other(opened: Open, says: Any, tmp_path: Path) -> None:
    """Two models in one directory: the same tokens, so the same keys, but other KV (P8)."""
    pool = MHATokenToKVPoolHost()
    first = opened(pool)
    assert first.batch_set_v1(names(2), pool.indices(0, 1)) == [True, True]
    strangers = [
        opened(pool, tp_rank=1, tp_size=2),
        opened(pool, pp_rank=1, pp_size=2),
        opened(pool, extra={"salt": "tenant"}),
        opened(pool, extra={"weights_version": "v2"}),
    ]
    says.arguments = Model(tmp_path / "other", seed=1).make()
    strangers.append(opened(pool))
    assert [one.batch_exists(names(2)) for one in strangers] == [0] * len(strangers)
    assert [one.batch_get_v1(names(2), pool.indices(0, 1)) for one in strangers] == [[False] * 2] * len(strangers)
    says.arguments = Model(tmp_path / "model again").make()
    assert opened(pool, dp_rank=1).batch_exists(names(2)) == 2


def test_one_rank_writes_latent_attention_for_all(opened: Open) -> None:
    pools = [MLATokenToKVPoolHost() for _ in range(2)]
    ranks = [opened(pool, is_mla_model=True, tp_rank=rank, tp_size=2) for rank, pool in enumerate(pools)]
    pools[0].fill()
    assert ranks[0].batch_set_v1(names(1), pools[0].indices(0)) == [True]
    assert ranks[1].batch_get_v1(names(1), pools[1].indices(3)) == [True]
    assert pools[1].page(3).tobytes() == pools[0].page(0).tobytes()


def test_a_draft_with_heads_is_refused_where_one_rank_writes(opened: Open) -> None:
    backend = opened(MLATokenToKVPoolHost(), is_mla_model=True, tp_size=2)
    with pytest.raises(ConfigError, match="pool draft"):
        backend.register_mem_host_pool_v2(MHATokenToKVPoolHost(), "draft")


def test_requests_with_one_prefix_hold_it_each_and_ranks_share_the_room(opened: Open) -> None:
    pool = MHATokenToKVPoolHost()
    backend, rank = opened(pool), opened(pool, tp_size=2)
    for one in (backend, rank):
        one.batch_set_v1(names(2), pool.indices(0, 1))
        assert [one.batch_exists(names(2)), one.batch_exists(names(2)), one._room.held()] == [2, 2, 2]
        one.batch_get_v1(names(2), pool.indices(0, 1))
        assert one._room.held() == 1
        one.batch_get_v1(names(2), pool.indices(0, 1))
        assert one._room.held() == 0
    assert backend._room._leases.size_max == 2 * rank._room._leases.size_max


def hybrid(opened: Open, policy: str) -> tuple[KVDepotHiCache, dict[str, Any], Callable[..., Transfer]]:
    pools: dict[str, Any] = {"kv": MLATokenToKVPoolHost(), "side": IndexerPoolHost()}
    backend = opened(pools["kv"], is_mla_model=True)
    for name, pool in pools.items():
        pool.fill(len(name))
        backend.register_mem_host_pool_v2(pool, name)

    def transfer(keys: list[str], *pages: int, pool: str = "side") -> Transfer:
        return Transfer(pool, keys, pools[pool].indices(*pages) if pages else None, policy)

    return backend, pools, transfer


def test_a_pool_beside_the_kv_is_never_shorter(opened: Open) -> None:
    backend, pools, transfer = hybrid(opened, "all_pages")
    keys = names(4)
    backend.batch_set_v1(keys, pools["kv"].indices(0, 1, 2, 3))
    assert backend.batch_set_v2([transfer(keys[:3], 0, 1, 2)]) == {"side": [True] * 3}
    found = backend.batch_exists_v2(keys, [transfer(keys)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [1, 2, 3])
    assert found.extra_pool_hit_pages == {"kv": 4, "side": 3}
    # Held until both pools have read the last page.
    assert backend.batch_get_v1(keys[:3], pools["kv"].indices(5, 6, 7)) == [True] * 3
    assert backend._room.held() == 1
    assert backend.batch_get_v2([transfer(keys[:3], 5, 6, 7)]) == {"side": [True] * 3}
    assert backend._room.held() == 0
    assert pools["side"].page(6).tobytes() == pools["side"].page(1).tobytes()
    assert backend.batch_get_v2([transfer(keys[2:], 8, 9)]) == {"side": [True, False]}


def test_a_window_ends_where_its_pages_are(opened: Open) -> None:
    backend, pools, transfer = hybrid(opened, "trailing_pages")
    keys = names(6)
    backend.batch_set_v1(keys, pools["kv"].indices(*range(6)))
    backend.batch_set_v2([transfer(keys[1:3], 1, 2), transfer(keys[5:], 5)])
    found = backend.batch_exists_v2(keys, [transfer(keys[:2])])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (3, [3])
    found = backend.batch_exists_v2(keys, [transfer(keys[:1])])
    assert found.restorable_prefix_pages == [2, 3, 6]
    found = backend.batch_exists_v2(keys, [Transfer("nobody", keys[:1], None, "trailing_pages")])
    assert (found.kv_hit_pages, backend.counts()["unknown_pool"]) == (0, 6)


def test_a_pool_without_bytes_is_governed_by_the_others(opened: Open) -> None:
    backend = opened(LogicalPool())
    side = IndexerPoolHost()
    backend.register_mem_host_pool_v2(side, "side")
    backend.register_mem_host_pool_v2(LogicalPool(), "kv")
    keys = names(3)
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys, np.arange(3)) == [True] * 3
    backend.batch_set_v2([Transfer("side", keys[:2], side.indices(0, 1))])
    assert backend.batch_exists_v2(keys, [Transfer("side", keys)]).kv_hit_pages == 2
    assert backend.batch_get_v1(keys[:2], np.arange(2)) == [True] * 2
    assert backend.batch_exists_v2(keys, []).kv_hit_pages == 0


def test_single_pages_in_tensors(opened: Open) -> None:
    pool = MHATokenToKVPoolHost()
    backend, keys = opened(pool), names(2)
    pool.fill()
    backend.batch_set_v1(keys[:1], pool.indices(2))
    tensor = Tensor(pool.page(0).size)
    assert backend.get(keys[0], tensor) is tensor
    assert tensor.data.tobytes() == pool.page(2).tobytes()
    assert backend.get(keys[1], tensor) is None
    assert backend.set(keys[1], tensor)
    assert backend.batch_set(keys, [tensor, tensor])
    assert backend.batch_get([*keys, "none"], [tensor, tensor, tensor]) == [tensor, tensor, None]
    assert backend.batch_get_v1(keys, pool.indices(4, 5)) == [True, True]
    assert pool.page(5).tobytes() == pool.page(2).tobytes()
    assert not backend.set(keys[1], Tensor(7))
    assert backend.counts()["no_flat_page"] == 1


def test_a_dead_depot_is_a_miss_until_it_is_back(opened: Open, home: Home) -> None:
    pool = MHATokenToKVPoolHost()
    backend, keys = opened(pool), names(3)
    backend.batch_set_v1(keys, pool.indices(0, 1, 2))
    home.kill()
    until(lambda: depot_pid(backend) != home.pid, "the depot is lost")
    assert backend.batch_exists(keys) <= 3  # as many as were on the disk, if another depot answers already
    home.found(backend)
    until(lambda: backend.batch_set_v1(keys, pool.indices(0, 1, 2)) == [True] * 3, "pages are stored again")
    assert backend.batch_exists(keys) == 3


def test_without_a_depot_everything_is_a_miss(opened: Open, home: Home, says: Any) -> None:
    extra = {"interface_v1": 1, **home.config, "start_depot": False, "attach_timeout_ms": 1}
    backend = KVDepotHiCache(Storage(extra))
    pool = MHATokenToKVPoolHost()
    backend.register_mem_pool_host(pool)
    try:
        assert backend.batch_exists(names(2)) == 0
        assert backend.batch_set_v1(names(2), pool.indices(0, 1)) == [False, False]
        assert backend.batch_get_v1(names(2), pool.indices(0, 1)) == [False, False]
        found = backend.batch_exists_v2(names(2), [Transfer("side", names(2))])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (0, [])
        assert backend.counts()["no_depot"] >= 6
        backend.clear()
        # A depot starts, and it is found without a restart of the backend.
        other = opened(pool)
        until(lambda: backend._room.attached, "the depot is found")
        until(lambda: backend.batch_set_v1(names(2), pool.indices(0, 1)) == [True, True], "the clear is confirmed")
        assert other.batch_exists(names(2)) == 2
    finally:
        backend.close()


def test_a_hung_depot_is_a_miss_in_bounded_time(opened: Open, home: Home) -> None:
    pool = MHATokenToKVPoolHost()
    backend = opened(pool, extra={"timeout_ms": 500, "call_timeout_ms": 50})
    with paused(home.pid):
        assert backend.batch_exists(names(4)) == 0
        assert backend.batch_exists_v2(names(4), [Transfer("kv", names(4))]).kv_hit_pages == 0
        assert backend.batch_set_v1(names(4), pool.indices(0, 1, 2, 3)) == [False] * 4
        assert backend.batch_get_v1(names(4), pool.indices(0, 1, 2, 3)) == [False] * 4
        assert not backend.clear()
    until(lambda: backend.batch_set_v1(names(4), pool.indices(0, 1, 2, 3)) == [True] * 4, "it answers again")


def test_what_is_cleared_is_gone_for_every_engine(opened: Open) -> None:
    pool = MHATokenToKVPoolHost()
    backend, other = opened(pool), opened(pool)
    backend.batch_set_v1(names(2), pool.indices(0, 1))
    backend.clear()
    assert backend._clearing.confirmed(UNTIL_S)
    assert [one.batch_exists(names(2)) for one in (backend, other)] == [0, 0]
    assert other.batch_set_v1(names(2), pool.indices(0, 1)) == [True, True]
    assert backend.batch_exists(names(2)) == 2


def test_a_clear_and_what_follows_it_wait_for_no_depot(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang clears on its scheduler's thread; the depot may take as long as ``timeout_ms``."""
    pool = MHATokenToKVPoolHost()
    backend, may_end = opened(pool), threading.Event()
    reset, threads = backend._clearing._send, []

    def late() -> bool:
        threads.append(threading.current_thread())
        return may_end.wait(UNTIL_S) and reset()

    monkeypatch.setattr(backend._clearing, "_send", late)
    backend.batch_set_v1(names(2), pool.indices(0, 1))
    assert not backend.clear()
    assert backend.batch_exists(names(2)) == 0
    assert backend.batch_get_v1(names(2), pool.indices(0, 1)) == [False, False]
    assert backend.batch_set_v1(names(2), pool.indices(0, 1)) == [False, False]
    may_end.set()
    assert backend._clearing.confirmed(UNTIL_S)
    assert backend.batch_exists(names(2)) == 0
    assert backend.batch_set_v1(names(2), pool.indices(0, 1)) == [True, True]
    assert threading.current_thread() not in threads


def test_a_clear_that_was_never_confirmed_is_an_error_at_the_end(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody sends its reset any more, and the pages are found by whoever attaches next."""
    backend, confirmed = opened(MHATokenToKVPoolHost()), opened(MHATokenToKVPoolHost())
    confirmed.clear()
    assert confirmed._clearing.confirmed(UNTIL_S)
    confirmed.close()
    assert UNSETTLED not in caplog.messages
    monkeypatch.setattr(backend._clearing, "_send", lambda: False)
    assert not backend.clear()
    for _ in range(2):
        backend.close()
    assert [record.levelname for record in caplog.records if record.getMessage() == UNSETTLED] == ["ERROR"]


def test_other_weights_in_place_turn_it_off(opened: Open, says: Any) -> None:
    """Pages of the earlier weights may still be queued for writing, so not even another namespace is correct."""
    pool = MHATokenToKVPoolHost()
    backend = opened(pool)
    backend.batch_set_v1(names(2), pool.indices(0, 1))
    says.arguments.weight_version = "two"
    assert backend.batch_exists(names(2)) == 0
    assert backend.batch_set_v1(names(2), pool.indices(0, 1)) == [False, False]
    assert backend.batch_get_v1(names(2), pool.indices(0, 1)) == [False, False]
    assert backend.counts()["other_weights"] == 6
    # Attached again.
    assert opened(pool).batch_exists(names(2)) == 0


def test_a_pool_smaller_than_the_work_fails_no_dump(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of pool, and ten times as much in pages: SGLang would write nothing after a failed page."""
    pool = MHATokenToKVPoolHost("page_first_direct", pages=16, page_size=1 << 14)
    pool.fill()
    backend = opened(pool)
    page_bytes = pool.page(0).size
    batches = 10 * (64 << 20) // page_bytes // 16
    for batch in range(batches):
        assert backend.batch_set_v1(names(16, f"b{batch}"), pool.indices(*range(16))) == [True] * 16
    before = [pool.page(number).tobytes() for number in range(16)]
    pool.buffer[:] = 0
    for batch in (0, batches - 1):
        assert backend.batch_exists(names(16, f"b{batch}")) == 16
        assert backend.batch_get_v1(names(16, f"b{batch}"), pool.indices(*range(16))) == [True] * 16
        assert [pool.page(number).tobytes() for number in range(16)] == before
    # Hits that are never read hold a bounded part of the pool, and not forever.
    for batch in range(batches):
        assert backend.batch_exists(names(16, f"b{batch}")) == 16
    assert backend._room._leases.size <= (64 << 20) // 4
    assert backend.counts()["not_leased"]
    assert backend._room.held() > 0
    now_s = time.monotonic()
    monkeypatch.setattr(room.time, "monotonic", lambda: now_s + leases.LEASE_S)
    backend.batch_get_v1(names(1, "other"), pool.indices(0))
    assert backend._room.held() == 0


def test_engines_of_one_depot_lease_a_part_of_its_pool_together(opened: Open) -> None:
    """Each one alone would lease a quarter: four of them the whole pool, and no dump would find space."""
    pool = MHATokenToKVPoolHost("page_first_direct", pages=16, page_size=1 << 10)
    engines = [opened(pool, extra={"salt": f"{number}"}) for number in range(4)]
    hits = range((64 << 20) // pool.page(0).size // 4 // 4)
    for backend in engines:
        for number in hits:
            assert backend.batch_set_v1(names(4, f"b{number:x}"), pool.indices(*range(4))) == [True] * 4
    for number in hits:
        for backend in engines:
            backend.batch_exists(names(4, f"b{number:x}"))
    depot = engines[0]._room._depot.stats()["depot"]
    assert 0 < depot["pool_leased_bytes"] <= depot["pool_bytes"] // 4
    assert all(backend.counts()["not_leased"] for backend in engines)
    assert engines[0].batch_set_v1(names(16, "more"), pool.indices(*range(16))) == [True] * 16


def test_sglang_gets_pages_and_rates_once(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class StorageMetrics:
        prefetch_pgs: list[int] = field(default_factory=list)
        backup_pgs: list[int] = field(default_factory=list)
        prefetch_bandwidth: list[float] = field(default_factory=list)
        backup_bandwidth: list[float] = field(default_factory=list)

    module = ModuleType("metrics_collector")
    module.StorageMetrics = StorageMetrics  # type: ignore[attr-defined]
    for name in ("sglang.srt.observability", "sglang.srt.observability.metrics_collector"):
        monkeypatch.setitem(sys.modules, name, module)
    pool = MHATokenToKVPoolHost()
    backend = opened(pool)
    backend.batch_set_v1(names(3), pool.indices(0, 1, 2))
    backend.batch_set_v1(names(1, "b"), pool.indices(3))
    backend.batch_get_v1([*names(2), *names(1, "c")], pool.indices(4, 5, 6))
    found = backend.get_stats()
    assert (found.backup_pgs, found.prefetch_pgs) == ([3, 1], [2])
    assert all(rate > 0 for rate in [*found.backup_bandwidth, *found.prefetch_bandwidth])
    assert (len(found.backup_bandwidth), len(found.prefetch_bandwidth)) == (2, 1)
    assert backend.get_stats() == StorageMetrics()


def test_what_became_of_pages_is_logged_at_the_end(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang.kvdepot")
    pool = MHATokenToKVPoolHost()
    backend = opened(pool)
    backend.batch_set_v1(names(2), pool.indices(0, 1))
    assert backend.batch_exists(names(3)) == 2
    backend.close()
    ((level, text),) = [(record.levelname, record.getMessage()) for record in caplog.records if "last" in record.msg]
    assert level == "INFO"
    assert text.endswith(" s: asked 3, dumped 2, hit 2, leased 2")


def test_calls_after_the_end_are_misses(opened: Open) -> None:
    pool = MHATokenToKVPoolHost()
    backend = opened(pool)
    backend.close()
    backend.close()
    assert backend.batch_exists(names(2)) == 0
    assert backend.batch_set_v1(names(2), pool.indices(0, 1)) == [False, False]
    assert backend.get_stats() is None


def test_a_panic_of_the_core_is_a_miss(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    pool = MHATokenToKVPoolHost()
    backend = opened(pool)

    def fail(*_: Any) -> None:
        raise panic("index out of bounds")

    monkeypatch.setattr(backend._room, "lookup_on_prefix", fail)
    monkeypatch.setattr(backend._room, "move", fail)
    assert backend.batch_exists(names(2)) == 0
    assert backend.batch_get_v1(names(2), pool.indices(0, 1)) == [False, False]
    assert backend.batch_set_v1(names(2), pool.indices(0, 1)) == [False, False]
    assert backend._resets.settled


def test_what_is_wrong_inside_is_a_miss(opened: Open) -> None:
    pool = MHATokenToKVPoolHost()
    backend = opened(pool)
    # Indices of fewer pages than there are keys.
    assert backend.batch_set_v1(names(2), pool.indices(0)) == [False, False]
    assert backend.batch_get_v2([Transfer("kv", names(1), None)]) == {"kv": [False]}
    assert backend.batch_exists([None]) == 0  # type: ignore[list-item]
    assert {"dump_error", "unknown_pool", "lookup_error"} <= set(backend.counts())


class BusyStore:
    """A store whose dumps fail once for each of the kinds."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = list(kinds)
        self.dumped: list[list[bytes]] = []

    def dump(self, hashes: list[bytes], addresses: Any, *, keep: Any) -> Any:
        self.dumped.append(hashes)
        kind = self.kinds.pop(0) if self.kinds else ""
        failed = np.array([len(hashes) - 1] if kind else [], dtype=np.int64)
        result = TaskResult(failed, {kind: 1} if kind else {})
        return SimpleNamespace(wait_done=lambda: True, result=lambda: result)

    def close(self, wait_ms: int) -> bool:
        return True


def busy_room(store: BusyStore, timeout_ms: int = 60_000) -> tuple[Room, Counters]:
    depot = SimpleNamespace(
        attached=True,
        trouble="",
        open_namespace=lambda facts, layout: None,
        open=lambda **_: store,
        close=lambda: None,
    )
    counters = Counters(lambda: logging.getLogger("test"))
    made = Room(load_config({"timeout_ms": timeout_ms}), counters, lambda _: depot)
    pages = Pages.of(MHATokenToKVPoolHost(), "kv")
    assert pages is not None
    made.open("kv", pages, {})
    return made, counters


def test_a_busy_depot_fails_no_dump() -> None:
    store = BusyStore("busy", "no_space", "busy")
    busy, counters = busy_room(store)
    addresses = np.zeros((2, 1), dtype=np.uint64)
    assert busy.move("dump", "kv", [b"a", b"b"], addresses) == [True, True]
    assert store.dumped == [[b"a", b"b"], [b"b"], [b"b"], [b"b"]]
    assert counters.snapshot() == {"dump_again": 3, "dumped": 2}


def test_a_dump_is_given_up_in_time_or_when_it_is_of_no_use() -> None:
    addresses = np.zeros((2, 1), dtype=np.uint64)
    busy, counters = busy_room(BusyStore(*["busy"] * 10_000), timeout_ms=1000)
    assert busy.move("dump", "kv", [b"a", b"b"], addresses) == [True, False]
    assert counters.snapshot()["dump_busy"] == 1
    store = BusyStore("unavailable")
    busy, counters = busy_room(store)
    assert busy.move("dump", "kv", [b"a", b"b"], addresses) == [True, False]
    assert (len(store.dumped), counters.snapshot()["dump_unavailable"]) == (1, 1)
    # The end does not wait for others.
    busy, _ = busy_room(BusyStore(*["busy"] * 10_000))
    busy._closing.set()
    assert busy.move("dump", "kv", [b"a", b"b"], addresses) == [True, False]


PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
"""What a panic of the core is in Python."""


@pytest.mark.parametrize("tells", [True, False])
def test_a_wait_that_panics_is_no_end_of_the_copy(tells: bool) -> None:
    """SGLang would reuse the pages: the task is asked until it is done, or gets its time limit."""
    asked: list[str] = []

    def panics() -> bool:
        asked.append("wait")
        raise PANIC("index out of bounds")

    def done() -> bool:
        asked.append("done")
        if not tells:
            raise PANIC("index out of bounds")
        return len(asked) == 4

    store = BusyStore()
    store.dump = lambda *_, **__: SimpleNamespace(  # type: ignore[method-assign]
        wait_done=panics, done=done, result=lambda: TaskResult(np.array([], dtype=np.int64), {})
    )
    room, counters = busy_room(store, timeout_ms=1234)
    limits: list[float] = []
    room._closing = SimpleNamespace(wait=limits.append)  # type: ignore[assignment]
    assert room.move("dump", "kv", [b"a"], np.zeros((1, 1), dtype=np.uint64)) == [True]
    assert asked == (["wait", "done", "done", "done"] if tells else ["wait", "done"])
    assert limits == ([] if tells else [1.234])
    assert counters.snapshot() == {"dump_error": 1 if tells else 2, "dumped": 1}
