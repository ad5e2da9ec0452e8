"""One attachment with many namespaces, and claims over several of them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvdepot

Pages = list[list[npt.NDArray[np.uint8]]]

WAIT_MS = 60_000
LONG_S = 900
POOL_GB = 1 / 128
"""8 MiB."""


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[kvdepot.Depot]:
    (tmp_path / "blocks").mkdir()
    config = {"directories": [str(tmp_path / "blocks")], "pool_gb": POOL_GB, "log_level": "warn"}
    with kvdepot.attach(config) as depot:
        yield depot


def open_rank(depot: kvdepot.Depot, rank: int = 0, model: str = "a", size: int = 4096) -> kvdepot.Store:
    return depot.open(layout=[size], namespace={"model": model, "rank": rank})


def names(count: int, prefix: bytes = b"block") -> list[bytes]:
    return [prefix + index.to_bytes(4, "big") for index in range(count)]


def pages(count: int, size: int = 4096, value: int = 1) -> Pages:
    return [[np.full(size, (value + index) % 256, dtype=np.uint8)] for index in range(count)]


def dump(store: kvdepot.Store, hashes: list[bytes], value: int = 1) -> None:
    size = store.layout.tensor_sizes_bytes[0]
    store.dump(hashes, pages(len(hashes), size, value)).wait().raise_for_failures()


def test_namespaces_of_any_size_share_an_attachment_and_do_not_see_each_other(depot: kvdepot.Depot) -> None:
    stores = [open_rank(depot, model=f"m{index}", size=512 * (index + 1)) for index in range(8)]
    for index, store in enumerate(stores):
        dump(store, names(index + 1), value=index)
    assert [store.lookup_on_prefix(names(8)) for store in stores] == list(range(1, 9))
    stores[3].close()
    with pytest.raises(kvdepot.UnavailableError):
        stores[3].dump(names(1), pages(1, 2048))
    assert depot.attached
    assert stores[4].lookup_on_prefix(names(8)) == 5, "the others stay open"
    for call in (stores[3].reset, lambda: stores[3].drain(1), lambda: depot.claim([stores[3]], names(1))):
        with pytest.raises(kvdepot.UnavailableError, match="the store is closed"):
            call()
    assert not stores[3].attached
    again = open_rank(depot, model="m3", size=2048)
    assert again.namespace_id == stores[3].namespace_id
    assert again.lookup_on_prefix(names(8)) == 4
    depot.reset([again, stores[0]])
    assert [store.lookup_on_prefix(names(8)) for store in (again, stores[0], stores[1])] == [0, 0, 2]


def test_a_claim_is_the_longest_prefix_that_all_groups_have(depot: kvdepot.Depot) -> None:
    ranks = [open_rank(depot, rank) for rank in range(2)]
    window = open_rank(depot, model="window")
    hashes = names(10)
    dump(ranks[0], hashes)
    dump(ranks[1], hashes[:7])
    dump(window, hashes[3:6])
    with depot.claim(ranks, hashes, label="request 1") as claim:
        assert claim.wait(WAIT_MS) == kvdepot.Hit(settled=True, units=7, units_from_tier=0)
    full, sliding = kvdepot.Group(ranks), kvdepot.Group([window], window_blocks=2)
    with depot.claim([full, sliding], hashes) as claim:
        assert claim.wait(WAIT_MS).units == 6, "the last two blocks of the window are 4 and 5"
    with depot.claim([full], hashes, skip=2, limit=4) as claim:
        assert claim.wait(WAIT_MS).units == 4
        times = claim.release(tell_times=True)
        assert times is not None
        assert (times.tiers, times.queued) == ((), False)
    with depot.claim([full], names(3, b"another")) as claim:
        assert claim.wait(WAIT_MS) == kvdepot.Hit(settled=True, units=0, units_from_tier=0)


def test_a_group_s_blocks_may_cover_several_hashes(depot: kvdepot.Depot) -> None:
    small, large = open_rank(depot), open_rank(depot, model="large")
    hashes = names(8)
    dump(small, hashes[:7])
    # A block has the hash of the last unit that it covers.
    dump(large, [hashes[3], hashes[7]])
    groups = [kvdepot.Group([small]), kvdepot.Group([large], hashes_per_block=4)]
    with depot.claim(groups, hashes) as claim:
        assert claim.wait(WAIT_MS).units == 4


def test_what_is_claimed_is_not_evicted_before_it_is_loaded(depot: kvdepot.Depot) -> None:
    store, other = open_rank(depot, size=1 << 18), open_rank(depot, model="b", size=1 << 18)
    hashes = names(4)
    dump(store, hashes, value=7)
    assert depot.drain(WAIT_MS)
    claim = depot.claim([store], hashes)
    assert claim.wait(WAIT_MS).units == 4
    fetched = depot.stats()["depot"]["fetch_blocks"]
    for turn in range(16):
        dump(other, names(8, b"turn%d" % turn))
        assert depot.drain(WAIT_MS)
        assert claim.poll().units == 4
    found = [[np.zeros(1 << 18, dtype=np.uint8)] for _ in hashes]
    store.load(hashes, found).wait().raise_for_failures()
    claim.release()
    claim.release()
    for index, [page] in enumerate(found):
        assert (page == 7 + index).all()
    assert depot.stats()["depot"]["fetch_blocks"] == fetched, "from the pool, four times as large as which was dumped"


def test_a_claim_brings_blocks_from_the_tiers(depot: kvdepot.Depot) -> None:
    store, other = open_rank(depot, size=1 << 18), open_rank(depot, model="b", size=1 << 18)
    hashes = names(3)
    dump(store, hashes)
    for turn in range(16):
        dump(other, names(8, b"turn%d" % turn))
        assert depot.drain(WAIT_MS)
    with depot.claim([store], hashes, tiers=()) as claim:
        assert claim.wait(WAIT_MS) == kvdepot.Hit(settled=True, units=0, units_from_tier=0)
    with depot.claim([store], hashes, tiers=["Posix"]) as claim:
        assert claim.wait(WAIT_MS) == kvdepot.Hit(settled=True, units=3, units_from_tier=3)
        times = claim.release(tell_times=True)
    assert times is not None
    assert times.admitted_ns is not None
    assert times.settled_ns is not None
    (reads,) = times.tiers
    assert (reads.tier, reads.blocks) == ("posix", 3)
    assert times.opened_ns >= times.admitted_ns > reads.first_ns >= reads.last_ns >= times.settled_ns > 0
    assert claim.release(tell_times=True) is None, "once only"
    (tier,) = depot.stats()["depot"]["tiers"]
    for moved, blocks in (tier["reads"], 3), (tier["writes"], 3 + 16 * 8):
        assert (moved["blocks"], moved["bytes"]) == (blocks, blocks << 18)
        assert sum(count for _, count in moved["buckets"]) <= blocks
        assert moved["sum_us"] > 0


def test_mistakes_are_told_before_anything_is_claimed(depot: kvdepot.Depot) -> None:
    with pytest.raises(kvdepot.ConfigError, match="each group needs a store"):
        depot.claim([kvdepot.Group([])], names(1))
    with pytest.raises(kvdepot.ConfigError, match="there must be a group"):
        depot.claim([], names(1))
    store, hashes = open_rank(depot), names(2)
    wide = kvdepot.Group([store], hashes_per_block=2)
    for groups, more, says in [
        ([store], {"skip": 5}, "skip: must be between 0 and the number of hashes, 2"),
        ([store], {"skip": -1}, "skip: must be between"),
        ([wide], {"skip": 1}, "multiple of hashes_per_block"),
        ([store], {"limit": -1}, "limit: must be 0 or more"),
        ([store], {"tiers": "Posix"}, "tiers: must be several names or none"),
        ([store], {"tiers": ["Posix", "Tape"]}, "no such tier .*tier=Tape"),
        ([kvdepot.Group([store], window_blocks=-1)], {}, "window_blocks must be 0 or more"),
        ([kvdepot.Group([store], hashes_per_block=0)], {}, "hashes_per_block 1 or more"),
        ([kvdepot.Group(["a"])], {}, "nothing but stores"),  # type: ignore[list-item]
    ]:
        with pytest.raises(kvdepot.ConfigError, match=says):
            depot.claim(groups, hashes, **more)  # type: ignore[arg-type]
    with pytest.raises(kvdepot.ConfigError, match="1 to 64 bytes"):
        depot.claim([open_rank(depot)], [b""])
    with pytest.raises(kvdepot.ConfigError, match="namespace: must be a dict"):
        kvdepot.open(layout=[64], namespace="demo")  # type: ignore[arg-type]
    with pytest.raises(kvdepot.ConfigError, match="layout: must be a BlockLayout, or a list of sizes"):
        kvdepot.open(layout=2048, namespace={"model": "demo"})  # type: ignore[arg-type]
    with pytest.raises(kvdepot.ConfigError, match="namespace: must describe"):
        depot.open(layout=[4], namespace={})


@pytest.mark.timeout(LONG_S)
def test_any_number_of_namespaces_may_be_opened_one_after_another(depot: kvdepot.Depot) -> None:
    """A depot lets a process use 2,048 at a time."""
    stays, hashes = open_rank(depot), names(1)
    dump(stays, hashes)
    for model in range(2_100):
        open_rank(depot, model=f"model {model}").close()
    with open_rank(depot, model="last") as last:
        dump(last, hashes)
        assert last.lookup_on_prefix(hashes) == 1
    assert stays.lookup_on_prefix(hashes) == 1


def test_a_namespace_stays_open_until_its_last_store_is_closed(depot: kvdepot.Depot) -> None:
    first, second, hashes = open_rank(depot), open_rank(depot), names(1)
    dump(first, hashes)
    first.close()
    first.close()
    assert second.lookup_on_prefix(hashes) == 1
    second.close()
    with open_rank(depot) as third:
        assert third.lookup_on_prefix(hashes) == 1, "a closed namespace keeps its blocks"


def test_closing_closes_the_stores_and_twice_is_once(tmp_path: Path) -> None:
    depot = kvdepot.attach({"pipeline": "Cache", "pool_gb": POOL_GB, "log_level": "warn"})
    store = open_rank(depot)
    dump(store, names(2))
    depot.close()
    depot.close()
    assert not depot.attached
    with pytest.raises(kvdepot.UnavailableError, match="the depot was closed"):
        open_rank(depot)
    with pytest.raises(kvdepot.UnavailableError):
        store.dump(names(1), pages(1))
    with kvdepot.open({"pipeline": "Cache", "pool_gb": POOL_GB}, layout=[64], namespace={"m": 1}) as alone:
        assert alone.attached
    assert not alone.attached, "it has its attachment to itself"


def test_without_a_depot_every_claim_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config: dict[str, Any] = {"mode": "node", "start_depot": False, "attach_timeout_ms": 50, "pool_gb": POOL_GB}
    with kvdepot.attach({**config, "pipeline": "Cache"}) as depot:
        assert not depot.attached
        assert depot.trouble
        with depot.claim([open_rank(depot)], names(3)) as claim:
            assert claim.wait(WAIT_MS) == kvdepot.Hit(settled=True, units=0, units_from_tier=0)
            assert claim.poll().settled


def test_a_dump_into_a_full_pool_says_what_to_do_and_succeeds_later(depot: kvdepot.Depot) -> None:
    half, count = 1 << 17, 40
    store = depot.open(layout=kvdepot.BlockLayout(shards=2, tensor_sizes_bytes=[half]), namespace={"model": "a"})
    memory = [np.zeros((count, half), dtype=np.uint8) for _ in range(2)]
    bases = np.array([shard.ctypes.data for shard in memory], dtype=np.uint64)
    store.register_pages(bases, np.array([half] * 2, dtype=np.int64), page_count=count, keep=memory)
    filling = store.begin_dump_pages(names(count), list(range(count)))
    assert repr(filling) == f"<kvdepot.Task {filling.id}: {count} blocks, in flight>"
    filling.submit_shard(0)
    end = time.monotonic() + WAIT_MS / 1000
    while depot.stats()["depot"]["pool_filling_bytes"] < 5 << 20:
        assert time.monotonic() < end, depot.stats()
        time.sleep(0.01)
    rows = [[page, page] for [page] in pages(8, half)]
    with pytest.raises(kvdepot.BusyError, match=r"8 blocks failed \(8 busy\).*again a little later.*pool_gb"):
        store.dump(names(8, b"more"), rows).wait().raise_for_failures()
    filling.submit_shard(1)
    assert set(filling.wait().failures) == {"busy"}, "more blocks than may be filled at a time"
    assert depot.drain(WAIT_MS)
    again = store.dump(names(8, b"more"), rows)
    again.wait().raise_for_failures()
    assert repr(again) == f"<kvdepot.Task {again.id}: 8 blocks, done>"


def test_a_failure_for_want_of_space_says_what_to_do() -> None:
    failed = kvdepot.TaskResult(failed=np.arange(3, 74), failures={"no_space": 71})
    with pytest.raises(kvdepot.NoSpaceError, match=r"71 blocks failed \(71 no_space\).*again a little later.*pool_gb"):
        failed.raise_for_failures()
