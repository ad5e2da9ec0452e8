"""Stores over a paged cache: memory that is registered once, copied by page and by shard."""

import gc
import select
import selectors
import time
import weakref
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

import kvdepot

WAIT_MS = 60_000
CONFIG = {"pipeline": "Cache", "pool_gb": 1 / 128, "log_level": "warn"}
LAYERS, PAGES, KEYS, VALUES = 3, 8, 512, 256
LAYOUT = kvdepot.BlockLayout(LAYERS, [KEYS, VALUES])
HASHES = [b"a", b"b", b"c"]

Cache = list[npt.NDArray[np.uint8]]


@pytest.fixture
def depot() -> Iterator[kvdepot.Depot]:
    with kvdepot.attach(CONFIG) as depot:
        yield depot


def cache(seed: int) -> Cache:
    """Returns tensors of a cache, keys and values of each layer in turn, with a row for each page."""
    numbers = np.random.default_rng(seed)
    return [
        numbers.integers(0, 256, size=(PAGES, size), dtype=np.uint8) for _ in range(LAYERS) for size in (KEYS, VALUES)
    ]


def register(store: kvdepot.Store, tensors: Cache, keep: object = None) -> None:
    bases = np.array([tensor.ctypes.data for tensor in tensors], dtype=np.uint64)
    strides = np.array([tensor.strides[0] for tensor in tensors], dtype=np.int64)
    store.register_pages(bases, strides, PAGES, tensors if keep is None else keep)


def opened(depot: kvdepot.Depot, tensors: Cache, model: str = "pages") -> kvdepot.Store:
    store = depot.open(layout=LAYOUT, namespace={"model": model})
    register(store, tensors)
    return store


def test_pages_come_back_in_other_pages(depot: kvdepot.Depot) -> None:
    tensors = cache(1)
    before = [tensor.copy() for tensor in tensors]
    store = opened(depot, tensors)
    task = store.dump_pages(HASHES, [1, 4, 6])
    assert task.wait_done(WAIT_MS)
    assert task.block_count == 3
    assert task.result().ok
    load = store.load_pages([*HASHES, b"never stored"], np.array([3, 2, 0, 7]), patience_ms=0)
    result = load.wait(WAIT_MS)
    assert (result.failed.tolist(), result.failures) == ([3], {"not_found": 1})
    for tensor, old in zip(tensors, before, strict=True):
        assert (tensor[[3, 2, 0]] == old[[1, 4, 6]]).all()
        assert (tensor[[1, 4, 5, 6]] == old[[1, 4, 5, 6]]).all()


def test_blocks_of_low_priority_go_first_and_those_of_high_priority_last(depot: kvdepot.Depot) -> None:
    store, count = opened(depot, cache(1)), 4096  # many more than fit
    store.dump_pages([b"important"], [0], priority="high").wait(WAIT_MS).raise_for_failures()
    store.dump_pages([b"usual"], [1]).wait(WAIT_MS).raise_for_failures()
    for first in range(0, count, 256):
        names = [number.to_bytes(4, "big") for number in range(first, first + 256)]
        store.dump_pages(names, [2] * 256, priority="low").wait(WAIT_MS)
    assert list(store.lookup([b"usual", (0).to_bytes(4, "big")])) == [True, False]
    stats = depot.stats()["depot"]
    assert stats["low_priority_blocks"] > 0
    assert stats["high_priority_blocks"] == 1
    for first in range(0, count, 256):
        names = [b"later %d" % number for number in range(first, first + 256)]
        store.dump_pages(names, [3] * 256).wait(WAIT_MS)
    assert list(store.lookup([b"important", b"usual"])) == [True, False]
    assert depot.stats()["depot"]["low_priority_blocks"] == 0


def test_a_priority_that_does_not_exist_is_refused_with_the_known_ones(depot: kvdepot.Depot) -> None:
    store = opened(depot, cache(1))
    for dump in (store.dump_pages, store.begin_dump_pages):
        with pytest.raises(kvdepot.ConfigError, match=r"urgent.*low, normal, high"):
            dump(HASHES[:1], [0], priority="urgent")  # type: ignore[arg-type]


def test_a_block_is_found_when_its_last_shard_was_submitted(depot: kvdepot.Depot) -> None:
    store = opened(depot, cache(2))
    task = store.begin_dump_pages(HASHES[:1], [5])
    task.submit_shard(1)
    task.submit_shard(0)
    assert task.wait_shard(1, timeout_ms=WAIT_MS)
    assert task.wait_shard(0)
    assert not task.wait_shard(2, timeout_ms=1)
    assert not task.wait_done(1)
    assert store.lookup_on_prefix(HASHES[:1]) == 0
    with pytest.raises(kvdepot.BusyError):
        task.result()
    task.submit_shard(2)
    task.wait(WAIT_MS).raise_for_failures()
    assert store.lookup_on_prefix(HASHES[:1]) == 1


def readable(descriptor: int, wait_s: float) -> bool:
    return bool(select.select([descriptor], [], [], wait_s)[0])


def test_a_task_s_descriptor_is_readable_from_its_end_on(depot: kvdepot.Depot) -> None:
    store = opened(depot, cache(2))
    task, other = store.begin_dump_pages(HASHES[:1], [5]), store.begin_dump_pages(HASHES[1:2], [4])
    descriptor = task.fileno()
    assert task.fileno() == descriptor, "a task has one"
    assert descriptor != other.fileno()
    for shard in range(3):
        assert not readable(descriptor, 0)
        task.submit_shard(shard)
    assert readable(descriptor, WAIT_MS / 1e3)
    assert task.done()
    task.wait(WAIT_MS).raise_for_failures()
    assert readable(descriptor, 0), "it stays so"
    assert not readable(other.fileno(), 0)
    for shard in range(3):
        other.submit_shard(shard)
    other.wait(WAIT_MS).raise_for_failures()
    assert readable(other.fileno(), 0)
    late = store.load_pages(HASHES[:1], [0])
    late.wait(WAIT_MS).raise_for_failures()
    assert readable(late.fileno(), 0), "asked for after the end"
    with selectors.DefaultSelector() as selector:
        selector.register(late, selectors.EVENT_READ)  # which asks an object for its descriptor
        assert [key.fileobj for key, _ in selector.select(0)] == [late]


def test_a_load_is_waited_for_shard_by_shard(depot: kvdepot.Depot) -> None:
    tensors = cache(3)
    store = opened(depot, tensors)
    store.dump_pages(HASHES, [0, 1, 2]).wait(WAIT_MS).raise_for_failures()
    task = store.load_pages(HASHES, [3, 4, 5])
    for layer in range(LAYERS):
        # Without a device's streams this thread waits.
        wait = task.wait_shard_on(layer, stream=0, timeout_ms=WAIT_MS) if layer else task.wait_shard(layer)
        assert wait
        for tensor in tensors[2 * layer : 2 * layer + 2]:
            assert (tensor[[3, 4, 5]] == tensor[[0, 1, 2]]).all()
    assert task.wait(WAIT_MS).ok


def test_shards_may_differ(depot: kvdepot.Depot) -> None:
    layout = kvdepot.BlockLayout.of_shards([[512, 256], [512, 256], [1024]])
    assert (layout.shards, layout.block_bytes, layout.runs) == (3, 2560, ((2, (512, 256)), (1, (1024,))))
    assert layout.to_json() == "[[2,[512,256]],[1,[1024]]]"
    with pytest.raises(kvdepot.ConfigError, match="the shards of this block differ"):
        _ = layout.tensor_sizes_bytes
    assert kvdepot.BlockLayout.of_shards([[512]] * 3) == kvdepot.BlockLayout(3, [512])
    store = depot.open(layout=layout, namespace={"model": "mixed"})
    with pytest.raises(kvdepot.ConfigError, match="different numbers of tensors"):
        store.dump([b"a"], [[np.zeros(1024, dtype=np.uint8)]], shards=[2])
    # Pieces that together fill the tensors.
    memory = np.random.default_rng(4).integers(0, 256, size=(2, 2560), dtype=np.uint8)
    sizes = np.array([512, 256, 512, 256, 512, 512], dtype=np.uint64)
    bases = np.uint64(memory.ctypes.data) + np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.uint64)
    store.register_pages(bases, np.full(6, 2560, dtype=np.int64), 2, memory, sizes=sizes)
    store.dump_pages([b"a"], [0]).wait(WAIT_MS).raise_for_failures()
    store.load_pages([b"a"], [1]).wait(WAIT_MS).raise_for_failures()
    assert (memory[0] == memory[1]).all()


def test_rows_of_shards_that_differ_have_their_own_sizes(depot: kvdepot.Depot) -> None:
    store = depot.open(layout=kvdepot.BlockLayout.of_shards([[512], [256]]), namespace={"model": "mixed"})
    rows = [[np.full(512, 1, dtype=np.uint8)], [np.full(256, 2, dtype=np.uint8)]]
    store.dump([b"a", b"a"], rows, shards=[0, 1]).wait().raise_for_failures()
    found = [[np.zeros(512, dtype=np.uint8), np.zeros(256, dtype=np.uint8)]]
    store.load([b"a"], found).wait().raise_for_failures()
    assert (found[0][0] == 1).all()
    assert (found[0][1] == 2).all()
    with pytest.raises(kvdepot.ConfigError, match="must have 256 bytes"):
        store.load([b"a"], rows[:1], shards=[1])
    with pytest.raises(kvdepot.ConfigError, match="a block has shards 0 to 1"):
        store.load([b"a"], rows[:1], shards=[2])


def test_mistakes_are_told_before_anything_is_copied(depot: kvdepot.Depot) -> None:
    store = depot.open(layout=LAYOUT, namespace={"model": "pages"})
    with pytest.raises(kvdepot.ConfigError):
        store.dump_pages(HASHES, [0, 1, 2])
    with pytest.raises(kvdepot.ConfigError):
        register(store, cache(5)[:-1])
    register(store, cache(5))
    with pytest.raises(kvdepot.ConfigError):
        store.load_pages(HASHES, [0, 1, PAGES])
    store.set_decoding(True)


class Owner:
    """Something that owns memory."""


def test_owners_are_held_as_long_as_their_memory_is_in_use(depot: kvdepot.Depot) -> None:
    tensors, pages_owner, row_owner = cache(6), Owner(), Owner()
    held = [weakref.ref(owner) for owner in (pages_owner, row_owner)]
    store = depot.open(layout=LAYOUT, namespace={"model": "pages"})
    register(store, tensors, pages_owner)
    addresses = np.array([[tensor.ctypes.data for tensor in tensors]], dtype=np.uint64)
    store.dump([b"a"], addresses, keep=row_owner).wait().raise_for_failures()
    del pages_owner, row_owner
    store.load_pages([b"a"], [1]).wait().raise_for_failures()
    # A core thread drops it after its task has ended, and a later call releases it.
    end_s = time.monotonic() + WAIT_MS / 1000
    while held[1]() is not None:
        assert time.monotonic() < end_s, "it is still held"
        store.lookup([b"anything"])
        gc.collect()
    assert held[0]() is not None
    assert store.close(WAIT_MS)
    gc.collect()
    assert held[0]() is None
    with pytest.raises(kvdepot.UnavailableError):
        store.load_pages([b"a"], [1])
