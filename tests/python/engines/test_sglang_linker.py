"""SGLang's external linker over the test's own depot, with stand-ins for pools and events."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from node import NodeDepot
from sglang_parts import LAYERS, PAGE, DeviceEntry, DeviceGroup, Model, Transfer, device_tensor, heads, names

from kvdepot.engines.sglang import KVDepotLinker, engine, leases, linker, room
from kvdepot.engines.sglang.device_pages import DevicePages, Piece
from kvdepot.engines.sglang.worker import Worker
from kvdepot.errors import ConfigError, DepotTimeoutError
from kvdepot.layout import BlockLayout
from tools.lab.pause import paused

pytestmark = pytest.mark.timeout(600)  # each wait has a limit of its own, and closing has three

UNTIL_S = 60.0
Open = Callable[..., KVDepotLinker]


def until(done: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + UNTIL_S
    while not done():
        assert time.monotonic() < end_s, f"not after {UNTIL_S:.0f} s: {what}"
        time.sleep(0.02)


def depot_pid(made: KVDepotLinker) -> int:
    return int(made._room._depot.stats().get("depot", {}).get("pid", 0))


def answering_pid(made: KVDepotLinker) -> int:
    """Waits until a depot answers. Returns its process."""
    end_s = time.monotonic() + UNTIL_S
    # Asked once for each look: with a short time limit the next call may not be answered.
    while not (pid := depot_pid(made)):
        assert time.monotonic() < end_s, "no depot answers"
        time.sleep(0.02)
    return pid


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeDepot]:
    # Copies have a time limit, and a hit is held for a while; here all may be as slow as they like.
    monkeypatch.setattr(linker, "COPY_S", UNTIL_S)
    monkeypatch.setattr(linker, "QUIET_S", UNTIL_S)
    monkeypatch.setattr(leases, "LEASE_S", 10 * UNTIL_S)
    made = NodeDepot(tmp_path)
    yield made
    made.kill()


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """State of the running SGLang."""
    ranks = {"pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "dcp_size": 1}
    told = SimpleNamespace(arguments=Model(tmp_path / "model").make(), tp=(0, 1), dcp_size=1)

    def linker_ranks(params: Any, *, replicated: bool) -> SimpleNamespace:
        rank, size = told.tp
        more = {"tp_rank": rank, "tp_size": size, "is_mla_model": replicated, "dcp_size": told.dcp_size}
        return SimpleNamespace(**{**ranks, **more})

    monkeypatch.setattr(engine, "linker_ranks", linker_ranks)
    monkeypatch.setattr(engine, "server_arguments", lambda: told.arguments)
    monkeypatch.setattr(engine, "sglang_version", lambda: "0.5.23")
    monkeypatch.setattr(engine, "hashes_know_adapters", lambda: True)
    return told


@pytest.fixture
def opened(home: NodeDepot, says: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Creates linkers over groups of pools, and closes them."""
    made: list[KVDepotLinker] = []
    monkeypatch.setattr(linker, "device_pool_group", lambda cache, params, components: cache)

    def open_linker(group: Any, **extra: Any) -> KVDepotLinker:
        group = group if isinstance(group, DeviceGroup) else DeviceGroup(group)
        allocator = SimpleNamespace(get_kvcache=lambda: group)
        params = SimpleNamespace(token_to_kv_pool_allocator=allocator)
        started_with = SimpleNamespace(**extra.pop("started_with", {}))
        config = {**home.config, "load_policy": "all", **extra}
        one = KVDepotLinker(started_with, params, components={"full"}, extra_config=config)
        made.append(one)
        if not home.pid and config.get("start_depot", True):
            home.pid = answering_pid(one)
        return one

    yield open_linker
    for one in made:
        one.close()


def transfer(keys: list[str], *pages: int, pool: str = "kv", policy: str = "all_pages") -> Transfer:
    indices = np.concatenate([np.arange(page * PAGE, (page + 1) * PAGE) for page in pages]) if pages else None
    return Transfer(pool, keys, None, policy, indices)


def stored(made: KVDepotLinker, *transfers: Transfer) -> bool:
    """Offloads, and returns the result."""
    assert made.offload(list(transfers))
    until(lambda: made.num_completed_offloads() == 1, "the offload has ended")
    return made.pop_completed_offload()


def loaded(made: KVDepotLinker, rid: str, *transfers: Transfer) -> bool:
    """Loads a hit that was looked up, and returns whether all layers are there."""
    if not made.load(rid, list(transfers)):
        return False
    return made.finish_layer_wise_loading(made.start_layer_wise_loading())


def test_pages_come_back_layer_by_layer(opened: Open) -> None:
    pools = [heads(), heads()]
    pools[0].fill()
    made, other, keys = opened(pools[0]), opened(pools[1]), names(3)
    assert made.lookup("a", [transfer(keys)]) == []
    assert stored(made, transfer(keys, 1, 2, 3))
    # What is there already is not copied again.
    assert stored(made, transfer(keys, 1, 2, 3))
    assert other.start_layer_wise_loading() == -1
    assert other.lookup("b", [transfer([*keys, *names(1, "b")])]) == [1, 2, 3]
    assert other._room.held() == 1
    # Into other pages, in another order.
    assert other.load("b", [transfer(keys, 9, 8, 2)])
    index = other.start_layer_wise_loading()
    for layer in other.layer_done_counter.batches[index]:
        assert layer.exception(timeout=UNTIL_S) is None
    assert other.finish_layer_wise_loading(index)
    assert [pools[1].page(number) for number in (9, 8, 2)] == [pools[0].page(number) for number in (1, 2, 3)]
    until(lambda: other._room.held() == 0, "what was loaded is not held any more")
    assert {name: other.counts()[name] for name in ("asked", "hit", "leased", "loaded")} == {
        "asked": 4,
        "hit": 3,
        "leased": 3,
        "loaded": 3,
    }


def test_several_requests_load_in_one_batch_and_a_queued_one_can_be_cancelled(opened: Open) -> None:
    pool = heads()
    pool.fill()
    made, keys = opened(pool), names(4)
    assert stored(made, transfer(keys, 0, 1, 2, 3))
    before = [pool.page(number) for number in range(4)]
    for rid, pages in (("a", (8, 9)), ("b", (10, 11)), ("c", (12, 13))):
        assert made.lookup(rid, [transfer(keys[:2])]) == [1, 2]
        assert made.load(rid, [transfer(keys[:2], *pages)])
    untouched = pool.page(10)
    assert made.cancel_queued_load("b")
    assert not made.cancel_queued_load("b")
    assert made._room.held() == 2
    assert made.finish_layer_wise_loading(made.start_layer_wise_loading())
    assert [pool.page(number) for number in (8, 9, 12, 13)] == before[:2] * 2
    assert pool.page(10) == untouched
    until(lambda: made._room.held() == 0, "nothing is held")


class Clock:
    """A clock that the test moves."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    time = monotonic


class Gate:
    """An event that happens when the test says so."""

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.order: list[str] = []

    def synchronize(self) -> None:
        assert self.happened.wait(UNTIL_S)
        self.order.append("event")

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that notes its calls."""

        def noted(*arguments: Any, **more: Any) -> Any:
            self.order.append("copy")
            return call(*arguments, **more)

        return noted


def held_up(monkeypatch: pytest.MonkeyPatch, made: KVDepotLinker, call: str) -> tuple[Gate, threading.Event]:
    """Makes copies wait for a gate once they have begun. Returns the gate, and what says that one has begun."""
    gate, begun = Gate(), threading.Event()
    original = getattr(made._room, call)

    def late(*arguments: Any, **more: Any) -> Any:
        begun.set()
        gate.synchronize()
        return original(*arguments, **more)

    monkeypatch.setattr(made._room, call, late)
    return gate, begun


def hung_load(monkeypatch: pytest.MonkeyPatch, made: KVDepotLinker, keys: list[str]) -> Gate:
    """Begins the load of a stored page into page 5, whose copy then hangs. Returns the gate that it waits for."""
    gate, begun = held_up(monkeypatch, made, "begin_load")
    assert made.lookup("a", [transfer(keys)]) == [1]
    assert made.load("a", [transfer(keys, 5)])
    assert made.start_layer_wise_loading() == 0
    assert begun.wait(UNTIL_S)
    return gate


def test_pages_are_read_after_the_events_that_write_them(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, gate = heads(), Gate()
    made, keys = opened(pool), names(1)
    monkeypatch.setattr(made._room, "move", gate.before(made._room.move))
    made.events = (gate,)
    assert made.offload([transfer(keys, 0)])
    pool.fill()  # what the forward pass writes
    assert made.num_completed_offloads() == 0
    gate.happened.set()
    until(lambda: made.num_completed_offloads() == 1, "the offload has ended")
    assert made.pop_completed_offload()
    assert gate.order == ["event", "copy"]
    made.lookup("a", [transfer(keys)])
    assert loaded(made, "a", transfer(keys, 5))
    assert pool.page(5) == pool.page(0)


def test_pages_are_written_after_the_work_that_uses_them(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    made, keys, gate = opened(heads()), names(1), Gate()
    gate.happened.set()
    assert stored(made, transfer(keys, 0))
    made.events = (gate,)
    monkeypatch.setattr(made._room, "begin_load", gate.before(made._room.begin_load))
    assert made.lookup("a", [transfer(keys)]) == [1]
    assert loaded(made, "a", transfer(keys, 5))
    assert gate.order == ["event", "copy"]


def test_a_hit_is_held_until_it_is_loaded_whatever_else_is_stored(opened: Open) -> None:
    """Without a lease the pool would have evicted it: there is no tier, and four times the pool is stored."""
    pool = heads(pages=64, token_bytes=4096)
    pool.fill()
    made, other, keys = opened(pool), opened(heads(pages=64, token_bytes=4096), salt="other"), names(2)
    assert stored(made, transfer(keys, 0, 1))
    before = [pool.page(0), pool.page(1)]
    assert made.lookup("a", [transfer(keys)]) == [1, 2]
    page_bytes = DevicePages.of(pool, "kv").size_bytes
    for number in range(4 * (64 << 20) // (32 * page_bytes)):
        stored(other, transfer(names(32, f"{number:x}f"), *range(32)))
    # SGLang asks again in every pass of its scheduler.
    assert made.lookup("a", [transfer(keys)]) == [1, 2]
    assert (made.counts()["asked"], made._room.held()) == (2, 1)
    assert loaded(made, "a", transfer(keys, 5, 6))
    assert [pool.page(5), pool.page(6)] == before
    assert made.lookup("b", [transfer(keys)]) == [1, 2]
    made._room.forget()
    for number in range(4 * (64 << 20) // (32 * page_bytes)):
        stored(other, transfer(names(32, f"{number:x}e"), *range(32)))
    # Nothing is held any more, so it is gone; a load is refused before anything is written.
    assert not made.load("b", [transfer(keys, 7, 8)])
    assert made.counts()["load_refused"] == 2


def test_a_request_holds_one_hit_and_a_forgotten_one_none(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = heads()
    made, keys = opened(pool), names(4)
    assert stored(made, transfer(keys, 0, 1, 2, 3))
    assert made.lookup("a", [transfer(keys)]) == [1, 2, 3, 4]
    # Its first pages are on the device now.
    assert made.lookup("a", [transfer(keys[2:])]) == [1, 2]
    assert made._room.held() == 1
    now_s = time.monotonic()
    monkeypatch.setattr("kvdepot.engines.sglang.room.time.monotonic", lambda: now_s + 3600)
    assert made.lookup("b", [transfer(keys[:1])]) == [1]
    assert (made._room.owners(), made.counts()["leases_expired"]) == ({b"b"}, 1)
    made.reset()
    assert made._room.held() == 0


def test_the_windows_of_a_hit_are_complete(opened: Open) -> None:
    pools = {"kv": heads(), "swa": heads("swa", first_layer=LAYERS)}
    for pool in pools.values():
        pool.fill()
    made, keys = opened(DeviceGroup(*pools.values())), names(6)

    def windows(*pages: int) -> Transfer:
        return transfer([keys[page] for page in pages], *pages, pool="swa", policy="trailing_pages")

    assert stored(made, transfer(keys, *range(6)), windows(2, 3))
    # Two pages at its end: there at 4 pages, not at 6.
    tail = Transfer("swa", keys[4:], None, "trailing_pages")
    assert made.lookup("a", [transfer(keys), tail]) == [4]
    assert made.lookup("b", [transfer(keys)]) == [], "nothing is known of the windows"
    before = [pools["kv"].page(0), pools["swa"].page(2), pools["swa"].page(3)]
    into = transfer(keys[2:4], 10, 11, pool="swa", policy="trailing_pages")
    assert loaded(made, "a", transfer(keys[:4], 8, 9, 12, 13), into)
    assert [pools["kv"].page(8), pools["swa"].page(10), pools["swa"].page(11)] == before


def test_a_lost_depot_is_a_miss_and_a_refused_load(opened: Open, home: NodeDepot) -> None:
    made, keys = opened(heads()), names(2)
    assert stored(made, transfer(keys, 0, 1))
    assert made.lookup("a", [transfer(keys)]) == [1, 2]
    home.kill()
    until(lambda: depot_pid(made) != home.pid, "the depot is lost")
    assert not made.load("a", [transfer(keys, 5, 6)])
    assert made.start_layer_wise_loading() == -1
    home.pid = answering_pid(made)
    assert made.lookup("a", [transfer(keys)]) == []
    until(lambda: stored(made, transfer(keys, 0, 1)), "pages are stored again")
    assert made.lookup("a", [transfer(keys)]) == [1, 2]


def test_without_a_depot_everything_is_a_miss(opened: Open) -> None:
    made, keys = opened(heads(), start_depot=False, attach_timeout_ms=1), names(2)
    assert made.lookup("a", [transfer(keys)]) == []
    assert not made.load("a", [transfer(keys, 0, 1)])
    assert not stored(made, transfer(keys, 0, 1))
    assert made.counts()["no_depot"] >= 4


def test_a_load_that_fails_is_reported_after_the_last_write(opened: Open, home: NodeDepot, says: Any) -> None:
    """A rank among several cannot refuse a load, and a depot can hang at any time: SGLang aborts the requests."""
    says.tp = (0, 2)
    made, keys = opened(heads(), timeout_ms=500, call_timeout_ms=200), names(2)
    assert made.load("a", [transfer(keys, 0, 1)])
    index = made.start_layer_wise_loading()
    assert not made.finish_layer_wise_loading(index)
    assert stored(opened(heads()), transfer(keys, 0, 1))
    with paused(home.pid):
        assert made.load("a", [transfer(keys, 5, 6)])
        assert not made.finish_layer_wise_loading(made.start_layer_wise_loading())
    assert made.counts()["load_failed"] == 4


def test_offloads_from_before_a_flush_store_nothing(opened: Open) -> None:
    pool, gate = heads(), Gate()
    made, keys = opened(pool), names(2)
    made.events = (gate,)
    assert made.offload([transfer(keys[:1], 0)])
    assert made.offload([transfer(keys[1:], 1)])
    flushed = threading.Thread(target=made.reset)
    flushed.start()
    until(lambda: made._resets.generation == 1, "the flush has begun")
    gate.happened.set()
    flushed.join(UNTIL_S)
    assert made.num_completed_offloads() == 0
    assert made.lookup("a", [transfer(keys)]) == []
    assert stored(made, transfer(keys, 0, 1)), "what comes after a flush is stored"


def test_a_copy_that_outlives_a_flush_is_forgotten(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages have been given to others meanwhile."""
    made, keys = opened(heads()), names(1)
    gate, begun = held_up(monkeypatch, made, "move")
    monkeypatch.setattr(linker, "QUIET_S", 0.01)
    assert made.offload([transfer(keys, 0)])
    assert begun.wait(UNTIL_S)
    made.reset()
    assert made.counts()["late_offload"] == 1
    gate.happened.set()
    until(made._clearing.settled, "the depot has forgotten it")
    assert made.lookup("a", [transfer(keys)]) == []
    assert made.num_completed_offloads() == 0


def test_a_copy_that_ends_during_a_flush_costs_nothing_stored(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are given to others only afterwards: the namespace, which other engines share, is not reset."""
    made, keys = opened(heads()), names(2)
    assert stored(made, transfer(keys[:1], 0))
    gate, begun = held_up(monkeypatch, made, "move")
    assert made.offload([transfer(keys[1:], 1)])
    assert begun.wait(UNTIL_S)
    flushed = threading.Thread(target=made.reset)
    flushed.start()
    until(lambda: made._resets.generation == 1, "the flush has begun")
    gate.happened.set()
    flushed.join(UNTIL_S)
    assert made._clearing.settled()
    assert made.lookup("a", [transfer(keys)]) == [1, 2]


def test_a_load_from_before_a_flush_writes_nothing(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages have been given to others, and SGLang has numbered its batches from 0 again (P1)."""
    pool, gate = heads(), Gate()
    pool.fill()
    made, keys = opened(pool), names(1)
    assert stored(made, transfer(keys, 0))
    made.events = (gate,)
    monkeypatch.setattr(linker, "QUIET_S", 0.01)
    assert made.lookup("a", [transfer(keys)]) == [1]
    assert made.load("a", [transfer(keys, 5)])
    assert made.start_layer_wise_loading() == 0
    untouched = pool.page(5)
    made.reset()
    assert made.lookup("b", [transfer(keys)]) == [1]
    assert made.load("b", [transfer(keys, 6)])
    assert made.start_layer_wise_loading() == 0
    gate.happened.set()
    assert made.finish_layer_wise_loading(0)
    assert (pool.page(5), pool.page(6)) == (untouched, pool.page(0))
    assert "late_load" not in made.counts()
    assert stored(made, transfer(names(1, "b"), 6))


def test_nothing_is_stored_after_a_load_that_outlives_a_flush(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may write into pages of later requests, and the depot would have its bytes as theirs (P1)."""
    pool = heads()
    pool.fill()
    made, keys = opened(pool), names(1)
    assert stored(made, transfer(keys, 0))
    monkeypatch.setattr(linker, "QUIET_S", 0.01)
    gate = hung_load(monkeypatch, made, keys)
    made.reset()
    assert made.counts()["late_load"] == 1
    assert not stored(made, transfer(names(1, "b"), 6))
    # A load behind it would wait as long as it does, and SGLang's forward pass with it (P2).
    assert made.lookup("b", [transfer(keys)]) == []
    assert not made.load("b", [transfer(keys, 7)])
    assert made.start_layer_wise_loading() == -1
    gate.happened.set()
    until(lambda: made.lookup("b", [transfer(keys)]) == [1], "the late load has ended")
    assert made.load("b", [transfer(keys, 7)])
    assert made.start_layer_wise_loading() == 0
    assert made.finish_layer_wise_loading(0), "the layers of the later batch are reported by itself"
    assert pool.page(7) == pool.page(0)
    assert not stored(made, transfer(names(1, "b"), 6)), "pages that it has written may be in SGLang's cache"
    monkeypatch.setattr(linker, "QUIET_S", UNTIL_S)
    made.reset()
    assert stored(made, transfer(names(1, "b"), 6))


@pytest.mark.parametrize("is_replicated", [False, True])
def test_a_rank_whose_load_outlives_a_flush_ends_the_engine(
    opened: Open, says: Any, monkeypatch: pytest.MonkeyPatch, is_replicated: bool
) -> None:
    """Its pages spoil what the other ranks compute and store, and they do not know (P1)."""
    pools = [heads(), heads()]
    ranks: list[KVDepotLinker] = []
    for rank, pool in enumerate(pools):
        says.tp = (rank, 2)
        if is_replicated:
            pool.device_pool = type("MLATokenToKVPool", (), {"dtype": "bfloat16"})()
        ranks.append(opened(DeviceGroup(pool, rank_replicated=is_replicated)))
    keys = names(1)
    for rank in ranks:
        assert stored(rank, transfer(keys, 0))
    gate = hung_load(monkeypatch, ranks[1], keys)
    ranks[0].reset()
    with monkeypatch.context() as patched:
        patched.setattr(linker, "QUIET_S", 0.01)
        with pytest.raises(DepotTimeoutError, match="rank 1 of 2 ends SGLang") as raised:
            ranks[1].reset()
    assert raised.value.kind == "timeout"
    assert ranks[1].counts()["late_load"] == 1
    assert ranks[1].lookup("b", [transfer(keys)]) == [], "whatever SGLang makes of the error"
    assert not stored(ranks[1], transfer(names(1, "b"), 6))
    gate.happened.set()
    ranks[1].close()


def test_a_linker_among_several_closes_although_a_load_hangs(
    opened: Open, says: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    says.tp = (1, 2)
    made, keys = opened(heads()), names(1)
    assert stored(made, transfer(keys, 0))
    monkeypatch.setattr(linker, "QUIET_S", 0.01)
    gate = hung_load(monkeypatch, made, keys)
    made.close()
    assert made.counts()["late_load"] == 1
    gate.happened.set()


def test_one_of_several_equal_ranks_writes_and_all_read(opened: Open, says: Any) -> None:
    pools = [heads(), heads()]
    pools[0].fill()
    ranks = []
    for rank, pool in enumerate(pools):
        says.tp = (rank, 2)
        ranks.append(opened(DeviceGroup(pool, rank_replicated=True)))
    keys = names(1)
    # The pool's class has heads, which differ between ranks.
    assert stored(ranks[1], transfer(keys, 0))
    assert ranks[0].lookup("a", [transfer(keys)]) == []
    for pool in pools:
        pool.device_pool = type("MLATokenToKVPool", (), {"dtype": "bfloat16"})()
    ranks = []
    for rank, pool in enumerate(pools):
        says.tp = (rank, 2)
        ranks.append(opened(DeviceGroup(pool, rank_replicated=True)))
    assert stored(ranks[1], transfer(keys, 0))
    assert ranks[0].lookup("a", [transfer(keys)]) == []
    assert stored(ranks[0], transfer(keys, 0))
    assert ranks[1].lookup("a", [transfer(keys)]) == [1]
    assert loaded(ranks[1], "a", transfer(keys, 3))
    assert pools[1].page(3) == pools[0].page(0)


def test_other_weights_in_place_turn_it_off(opened: Open, says: Any) -> None:
    made, keys = opened(heads()), names(1)
    assert stored(made, transfer(keys, 0))
    says.arguments.weight_version = "2"
    assert made.lookup("a", [transfer(keys)]) == []
    assert not stored(made, transfer(keys, 0))
    assert made.counts()["other_weights"] == 2


def test_engines_that_differ_find_nothing_of_each_other(opened: Open, says: Any, tmp_path: Path) -> None:
    keys = names(1)
    assert stored(opened(heads()), transfer(keys, 0))
    assert opened(heads()).lookup("a", [transfer(keys)]) == [1]
    assert opened(heads(), salt="other").lookup("a", [transfer(keys)]) == []
    assert opened(heads(first_layer=LAYERS)).lookup("a", [transfer(keys)]) == []
    says.arguments = Model(tmp_path / "other", seed=1).make()
    assert opened(heads()).lookup("a", [transfer(keys)]) == []


def test_too_many_waiting_offloads_fail_in_their_turn(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    made, gate = opened(heads()), Gate()
    made.events = (gate,)
    monkeypatch.setattr(linker, "OFFLOADS_MAX", 2)
    assert made.offload([transfer(names(1), 0)])
    until(lambda: made._offloads.waiting == 0, "the first is running")
    for number in range(1, 5):
        assert made.offload([transfer(names(1, f"{number}c"), number)])
    gate.happened.set()
    until(lambda: made.num_completed_offloads() == 5, "all have ended")
    assert [made.pop_completed_offload() for _ in range(5)] == [True, True, True, False, False]


def test_offloads_wait_together_for_a_depot_that_stays_busy(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang evicts no page until it has the result of its offload, and admits nothing without free pages (P2)."""
    made, clock, gate = opened(heads()), Clock(), Gate()
    made.events = (gate,)
    attempts: list[float] = []

    def busy(verb: str, pool: Any, hashes: list[bytes], places: Any) -> tuple[Any, dict[str, int]]:
        attempts.append(clock.now_s)
        return np.arange(len(hashes)), {"busy": len(hashes)}

    def wait(seconds: float) -> bool:
        clock.now_s += seconds
        return False

    monkeypatch.setattr(made._room, "_moved", busy)
    monkeypatch.setattr(made._room, "_closing", SimpleNamespace(wait=wait, set=lambda: None))
    for module in (linker, room):
        monkeypatch.setattr(module, "time", clock)
    began_s = clock.now_s
    for number in range(50):
        assert made.offload([transfer(names(1, f"{number:x}e"), number % 16)])
    gate.happened.set()
    assert made._offloads.drain(UNTIL_S)
    assert [made.pop_completed_offload() for _ in range(50)] == [False] * 50
    assert clock.now_s <= began_s + linker.FULL_S
    # Each is tried at least once, and the first one again.
    assert 60 <= len(attempts) <= 80
    assert made.counts()["dump_busy"] == 50


def test_the_depot_knows_which_request_missed(opened: Open, home: NodeDepot) -> None:
    made, keys = opened(heads()), names(2)
    assert stored(made, transfer(keys[:1], 0))
    assert made.lookup("request-7", [transfer(keys)]) == [1]
    command = [sys.executable, "-m", "kvdepot", "why", "request-7", "--socket", home.config["socket"]]

    def said() -> str:
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=UNTIL_S).stdout

    # A claim may be settled just before its miss is told.
    until(lambda: "never stored" in said(), "the miss is told")


def test_after_close_nothing_is_taken(opened: Open) -> None:
    made, keys = opened(heads()), names(1)
    made.close()
    made.close()
    assert made.lookup("a", [transfer(keys)]) == []
    assert not made.offload([transfer(keys, 0)])
    assert not made.load("a", [transfer(keys, 0)])


@pytest.mark.parametrize("error", [KeyError, type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})])
def test_a_job_that_fails_does_not_stop_those_behind_it(error: type[BaseException]) -> None:
    done: list[int] = []

    def run(job: int) -> None:
        if job == 1:
            raise error(job)
        done.append(job)

    worker = Worker("test", run)
    assert all(worker.put(job) for job in range(3))
    assert worker.drain(UNTIL_S)
    assert worker.close(UNTIL_S)
    assert (done, worker.put(3)) == ([0, 2], False)


def test_decode_context_parallelism_is_refused(opened: Open, says: Any) -> None:
    says.dcp_size = 2
    with pytest.raises(ConfigError, match="attn-dcp-size"):
        opened(heads())


def test_memory_that_sglang_may_release_is_refused(opened: Open) -> None:
    """SGLang releases it before it tells the linker: copies would still use it, and later ones find other memory."""
    with pytest.raises(ConfigError, match="enable-memory-saver"):
        opened(heads(), started_with={"enable_memory_saver": True})
    opened(heads(), started_with={"enable_memory_saver": False})


@pytest.mark.parametrize(
    ("keys", "seconds"),
    [
        ({"load_policy": "best_effort"}, 0.0),
        ({"load_policy": "deadline", "load_deadline_ms": 250}, 0.25),
        ({"load_policy": "all", "timeout_ms": 5000}, 5.0),
        ({}, 1.0),
    ],
)
def test_how_long_a_lookup_waits_for_a_tier(opened: Open, keys: dict[str, Any], seconds: float) -> None:
    config = {"load_policy": "faster", "start_depot": False, "attach_timeout_ms": 1, **keys}
    assert opened(heads(), **config)._patience.wait_s == seconds


def test_a_question_that_is_repeated_waits_for_tiers_only_once(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asks in every pass of its scheduler for a request that it cannot admit (P2)."""
    made = opened(heads(), load_policy="faster")
    waits: list[float] = []

    def hold(*_: Any, wait_s: float, **__: Any) -> int:
        waits.append(wait_s)
        return 0

    monkeypatch.setattr(made._room, "hold", hold)
    for chain in ("a", "a", "b", "b"):
        assert made.lookup("waiting", [transfer(names(2, chain))]) == []
    assert waits == [1.0, 0.05, 1.0, 0.05]
    for number in range(linker.MISSES_KEPT + 10):
        assert made.lookup(str(number), [transfer(names(1))]) == []
    assert len(made._questions) <= linker.MISSES_KEPT + 1


def test_a_tier_that_does_not_deliver_stops_the_scheduler_for_a_tenth_of_the_time(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(linker, "time", clock)

    def waits(policy: str, *, delivers: bool = False) -> list[float]:
        made = opened(heads(), load_policy=policy, timeout_ms=2000)
        found: list[float] = []

        def hold(*_: Any, wait_s: float, **__: Any) -> int:
            found.append(wait_s)
            clock.now_s += wait_s / 2 if delivers else wait_s
            return 0

        monkeypatch.setattr(made._room, "hold", hold)
        began_s = clock.now_s
        for number in range(400):
            clock.now_s += 0.125
            assert made.lookup(str(number), [transfer(names(1))]) == []
        assert delivers or policy != "faster" or sum(found) <= (clock.now_s - began_s) / 10 + 1.0
        return found

    assert waits("faster")[:73] == [1.0, *[0.0] * 70, 1.0, 0.0]
    assert set(waits("faster", delivers=True)) == {1.0}
    # Whoever says how long to wait means it.
    assert set(waits("all")) == {2.0}


def test_a_rank_among_several_may_wait_again_once_its_hit_is_loaded(
    opened: Open, says: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own hit is none if another rank has not found it, and all ranks have waited in vain."""
    says.tp = (0, 2)
    made, clock = opened(heads(), load_policy="faster"), Clock()
    monkeypatch.setattr(linker, "time", clock)
    limits: list[float] = []

    def hold(*_: Any, wait_s: float, **__: Any) -> int:
        limits.append(wait_s)
        clock.now_s += min(wait_s, 0.75)
        return 2

    monkeypatch.setattr(made._room, "hold", hold)
    monkeypatch.setattr(made._room, "renew", lambda owner: 2)

    def ask(rid: str) -> None:
        assert made.lookup(rid, [transfer(names(2))]) == [1, 2]

    for _ in range(2):
        ask("a")
        assert made.load("a", [transfer(names(2), 1, 2)])
        assert made.cancel_queued_load("a")
    assert limits == [1.0, 1.0]
    ask("b")
    assert made.load("b", [transfer(names(1), 1)]), "another rank has found less"
    ask("c")
    assert limits[2:] == [1.0, 0.25]


def test_both_directions_of_copies_share_the_time_of_a_flush(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    made, clock = opened(heads()), Clock()
    monkeypatch.setattr(linker, "time", clock)
    waits: list[float] = []

    def drain(wait_s: float) -> bool:
        waits.append(wait_s)
        clock.now_s += min(wait_s, 20.0)
        return False

    monkeypatch.setattr(made._loads, "drain", drain)
    monkeypatch.setattr(made._offloads, "drain", drain)
    made.reset()
    assert waits == [linker.QUIET_S, linker.QUIET_S - 20.0]


def test_where_the_pieces_of_a_page_are() -> None:
    pool = heads()
    pages = DevicePages.of(pool, "kv")
    bytes_of_piece = PAGE * 64
    assert pages.layout == BlockLayout(LAYERS, [bytes_of_piece] * 2)
    assert (pages.size_bytes, pages.count, pages.layers) == (2 * LAYERS * bytes_of_piece, 16, (0, 1, 2))
    assert pages.shards[1] == tuple(
        Piece(pool.kv_buffer[number].ctypes.data, bytes_of_piece, bytes_of_piece) for number in (1, LAYERS + 1)
    )
    assert pages.places([8, 0]).tolist() == [2, 0]
    assert (pages.shard_of(2), pages.shard_of(3)) == (2, None)
    with pytest.raises(ValueError, match="multiples of 4"):
        pages.places([6])


def test_layers_may_have_different_tensors_and_rows_may_be_pages() -> None:
    tensors = [device_tensor(8, size) for size in (100, 100, 30)]
    pages = DevicePages.of(DeviceEntry("indexer", tensors, {0: (0, 2), 3: 1}, span=1), "indexer")
    assert pages.layout == BlockLayout.of_shards([[100, 30], [100]])
    assert (pages.count, pages.layers, pages.places([7]).tolist()) == (8, (0, 3), [7])


@pytest.mark.parametrize("wrong", ["apart", "unmapped", "device", "large", "rows"])
def test_pools_that_cannot_be_used_are_refused(wrong: str) -> None:
    pool = heads()
    if wrong == "apart":
        base, stride, size = pool.buffer_meta[0][0]
        pool.buffer_meta[0][0] = (base, 2 * stride, size)
    elif wrong == "unmapped":
        del pool.layer_mapping[2]
    elif wrong == "device":
        pool.kv_buffer[0].device = SimpleNamespace(type="npu", index=0)
    elif wrong == "large":
        pool.buffer_meta[0] = [(base, stride, size << 30) for base, stride, size in pool.buffer_meta[0]]
    else:
        base, stride, size = pool.buffer_meta[0][0]
        pool.buffer_meta[0][0] = (base, stride, size // PAGE)
    with pytest.raises(ConfigError, match="pool kv"):
        DevicePages.of(pool, "kv")


def test_keys_of_a_repeated_question_are_hashed_once(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    page_hashes = linker.page_hashes

    def counted(keys: Any) -> list[bytes]:
        hashed.append(len(keys))
        return page_hashes(keys)

    monkeypatch.setattr(linker, "page_hashes", counted)
    made, keys, misses = opened(heads()), names(4), names(3, "c")
    assert stored(made, transfer(keys, 0, 1, 2, 3))
    assert hashed == [4]
    for _ in range(3):
        # SGLang makes new lists.
        assert made.lookup("a", [transfer(list(keys))]) == [1, 2, 3, 4]
        assert made.lookup("b", [transfer(list(misses))]) == []
    assert hashed == [4, 4, 3]
    assert loaded(made, "a", transfer(keys[:3], 5, 6, 7))
    assert hashed == [4, 4, 3]
    assert made.lookup("b", [transfer(misses[1:])]) == [], "another question"
    assert hashed == [4, 4, 3, 2]
