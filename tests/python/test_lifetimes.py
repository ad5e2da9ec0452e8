"""Memory that a task touches lives until no copy touches it any more, whatever the caller does with its lists."""

import collections
import gc
import itertools
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from node import NodeDepot

import kvdepot

SIZE = 4096
NAMESPACE = {"model": "tiny", "dtype": "uint8"}
HANG_S = 60
"""Limit against a hang of the test itself, not a measure of speed."""


@pytest.fixture
def node(tmp_path):
    depot = NodeDepot(tmp_path)
    yield depot
    depot.kill()


def pattern(seed):
    return np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)


def names(count):
    return [b"block%d" % index for index in range(count)]


def eventually(is_so, store):
    """A core thread drops an array, and a call of the store releases it."""
    end_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < end_s, "the arrays are still held"
        store.lookup([b"anything"])


@pytest.mark.parametrize("direction", ["dump", "load"])
@pytest.mark.parametrize("task_is", ["kept", "dropped"])
def test_arrays_live_when_lists_are_cleared(node, direction, task_is):
    store, hashes = node.open([SIZE], NAMESPACE), names(8)
    if direction == "load":
        store.dump(hashes, [[pattern(seed)] for seed in range(8)]).wait().raise_for_failures()
    rows = [[pattern(seed)] if direction == "dump" else [np.zeros(SIZE, np.uint8)] for seed in range(8)]
    arrays = [weakref.ref(row[0]) for row in rows]
    with node.stopped():
        task = getattr(store, direction)(hashes, rows)
        for row in rows:
            row.clear()
        rows.clear()
        row = None
        if task_is == "dropped":
            task = None
        gc.collect()
        alive = [array() is not None for array in arrays]
        found = [array() for array in arrays] if direction == "load" else []
    assert alive == [True] * 8
    if direction == "load":
        eventually(lambda: all(bytes(array) == bytes(pattern(seed)) for seed, array in enumerate(found)), store)
        found.clear()
    if task is not None:
        task.wait().raise_for_failures()
    # Not forever: an ended task holds nothing, even if it is kept.
    eventually(lambda: all(array() is None for array in arrays), store)
    if direction == "dump":
        found = [[np.zeros(SIZE, np.uint8)] for _ in range(8)]
        store.load(hashes, found).wait().raise_for_failures()
        assert [bytes(row[0]) for row in found] == [bytes(pattern(seed)) for seed in range(8)]
    store.close()


def test_arrays_live_although_a_sequence_makes_them_anew(node):
    store, made = node.open([SIZE], NAMESPACE), []

    class Rows:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            if index >= 2:
                raise IndexError
            array = pattern(index)
            made.append(weakref.ref(array))
            return [array]

    with node.stopped():
        task = store.dump(names(2), Rows())
        gc.collect()
        assert [array() is not None for array in made] == [True, True]
    task.wait().raise_for_failures()
    found = [[np.zeros(SIZE, np.uint8)] for _ in range(2)]
    store.load(names(2), found).wait().raise_for_failures()
    assert [bytes(row[0]) for row in found] == [bytes(pattern(index)) for index in range(2)]
    store.close()


def test_the_storage_of_a_tensor_is_held_too(node):
    """``Tensor.set_`` and ``tensor.data =`` give a tensor another storage, and free the one that a task reads."""

    class Tensor:
        device = type("Device", (), {"type": "cpu"})()

        def __init__(self, array):
            self.array = array

        def data_ptr(self):
            return self.array.ctypes.data

        def is_contiguous(self):
            return True

        def numel(self):
            return self.array.size

        def element_size(self):
            return 1

        def untyped_storage(self):
            return memoryview(self.array)

    store, tensor = node.open([SIZE], NAMESPACE), Tensor(pattern(1))
    array = weakref.ref(tensor.array)
    with node.stopped():
        task = store.dump([b"a"], [[tensor]])
        tensor.array = pattern(2)
        gc.collect()
        assert array() is not None
    task.wait().raise_for_failures()
    eventually(lambda: array() is None, store)
    found = [[np.zeros(SIZE, np.uint8)]]
    store.load([b"a"], found).wait().raise_for_failures()
    assert bytes(found[0][0]) == bytes(pattern(1))
    store.close()


def test_many_threads_use_one_store(node):
    """No unreferenced task is lost, nor the memory that it reads."""
    threads, tasks = 16, 30
    store, arrays, lock = node.open([SIZE], NAMESPACE), [], threading.Lock()
    start = threading.Barrier(threads)
    switch_s = sys.getswitchinterval()

    def dump(thread):
        start.wait()
        for task in range(tasks):
            array = pattern(thread * tasks + task)
            with lock:
                arrays.append(weakref.ref(array))
            store.dump([b"%d-%d" % (thread, task)], [[array]])

    sys.setswitchinterval(1e-6)
    try:
        with node.stopped():
            running = [threading.Thread(target=dump, args=(thread,)) for thread in range(threads)]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()
            gc.collect()
            assert sum(array() is None for array in arrays) == 0
    finally:
        sys.setswitchinterval(switch_s)
    # Dumps end in any order, but none begins before the two that the core's threads are working on.
    hashes = [b"%d-%d" % (thread, task) for thread in range(threads) for task in range(tasks)]
    eventually(lambda: store.lookup(hashes).all(), store)
    found = [[np.zeros(SIZE, np.uint8)] for _ in hashes]
    store.load(hashes, found).wait().raise_for_failures()
    assert [bytes(row[0]) for row in found] == [bytes(pattern(index)) for index in range(threads * tasks)]
    store.close()


def test_close_waits_for_tasks_that_nobody_keeps(node):
    store, array = node.open([SIZE], NAMESPACE), pattern(1)
    with node.stopped():
        store.dump([b"a"], [[array]])
        closing = threading.Thread(target=store.close)
        closing.start()
        # Closed for new tasks immediately, but not finished before the task.
        with pytest.raises(kvdepot.UnavailableError, match="closed"):
            collections.deque((store.dump([b"b"], [[array]]) for _ in itertools.count()), maxlen=0)
        assert closing.is_alive()
    closing.join(HANG_S)
    assert not closing.is_alive()
    again = node.open([SIZE], NAMESPACE)
    assert again.lookup([b"a"]).tolist() == [True]
    again.close()


@pytest.mark.parametrize("dtype", ["O", [("a", "u1", 8), ("b", "O")], "T"])
@pytest.mark.parametrize("verb", ["dump", "load"])
def test_arrays_that_hold_python_objects_are_refused(verb, dtype):
    if dtype == "T" and not hasattr(np.dtypes, "StringDType"):
        pytest.skip("numpy 1 has no such strings")
    array = np.zeros(64, dtype=dtype)
    with (
        kvdepot.open(
            {"pipeline": "Cache", "pool_gb": 0.0625, "log_level": "warn"}, layout=[array.nbytes], namespace=NAMESPACE
        ) as store,
        pytest.raises(kvdepot.ConfigError, match=r"tensor \[0\]\[0\] holds Python objects"),
    ):
        getattr(store, verb)([b"a"], [[array]])


def test_failures_are_counted_by_block(tmp_path):
    config = {"pipeline": "Cache", "pool_gb": 0.0625, "log_level": "warn"}
    layout = kvdepot.BlockLayout(shards=3, tensor_sizes_bytes=[64])
    with kvdepot.open(config, layout=layout, namespace=NAMESPACE) as store:
        rows = [[np.zeros(64, np.uint8) for _ in range(3)] for _ in range(2)]
        result = store.load([b"a", b"b"], rows).wait()
    assert result.failed.tolist() == [0, 1]
    assert result.failures == {"not_found": 2}
