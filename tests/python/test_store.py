"""The library's interface over an embedded depot: bytes survive a round trip, mistakes are reported before any copy."""

import asyncio
import gc
import time

import numpy as np
import pytest

import kvdepot

LAYOUT = kvdepot.BlockLayout(shards=3, tensor_sizes_bytes=[512, 256])
NAMESPACE = {"model": "tiny", "dtype": "uint8"}


@pytest.fixture
def opened(tmp_path):
    stores = []
    (tmp_path / "blocks").mkdir()

    def opened(layout=LAYOUT, namespace=NAMESPACE, **changes):
        config = {"directories": [str(tmp_path / "blocks")], "pool_gb": 0.0625, "log_level": "warn", **changes}
        stores.append(kvdepot.open(config, layout=layout, namespace=namespace))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


def blocks(count, seed=0, layout=LAYOUT):
    generator = np.random.default_rng(seed)
    sizes = layout.tensor_sizes_bytes * layout.shards
    return [[generator.integers(0, 256, size=size, dtype=np.uint8) for size in sizes] for _ in range(count)]


def empty_like(rows):
    return [[np.zeros_like(tensor) for tensor in row] for row in rows]


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def names(count, prefix=b"block"):
    return [prefix + index.to_bytes(4, "big") for index in range(count)]


def test_whole_blocks_come_back(opened):
    store, rows, hashes = opened(), blocks(5), names(5)
    assert store.lookup_on_prefix(hashes) == 0
    store.dump(hashes, rows).wait().raise_for_failures()
    assert store.lookup(hashes).tolist() == [True] * 5
    assert store.lookup_on_prefix([*hashes[:2], b"another", hashes[2]]) == 2
    store.prefetch(hashes)
    found = empty_like(rows)
    task = store.load(hashes, found)
    assert store.wait(task).ok
    assert store.check(task)
    assert_same(found, rows)


def test_shards_come_one_by_one(opened):
    store, (row,), (name,) = opened(), blocks(1), names(1)
    shards = [row[0:2], row[2:4], row[4:6]]
    store.dump([name, name], shards[:2], shards=[0, 1]).wait().raise_for_failures()
    assert not store.lookup([name])[0]
    store.dump([name], shards[2:], shards=[2]).wait().raise_for_failures()
    assert store.lookup([name])[0]
    found = empty_like(shards)
    store.load([name] * 3, found, shards=[0, 1, 2]).wait().raise_for_failures()
    assert_same(found, shards)


def test_raw_addresses(opened):
    store, rows, hashes = opened(), blocks(2), names(2)
    found = empty_like(rows)
    addresses_of = lambda rows: np.array([[tensor.ctypes.data for tensor in row] for row in rows], dtype=np.uint64)  # noqa: E731
    store.dump(hashes, addresses_of(rows)).wait().raise_for_failures()
    store.load(hashes, addresses_of(found)).wait().raise_for_failures()
    assert_same(found, rows)


def test_missing_blocks_fail_alone(opened):
    store, rows, hashes = opened(), blocks(3), names(3)
    store.dump(hashes[:2], rows[:2]).wait().raise_for_failures()
    found = empty_like(rows)
    result = store.load([hashes[0], b"never dumped", hashes[1]], found).wait()
    assert result.failed.tolist() == [1]
    assert set(result.failures) == {"not_found"}
    assert_same([found[0], found[2]], rows[:2])
    with pytest.raises(kvdepot.BlockNotFoundError) as caught:
        result.raise_for_failures()
    assert caught.value.kind == "not_found"


def test_tasks_can_be_awaited(opened):
    store, rows, hashes = opened(), blocks(4), names(4)
    found = empty_like(rows)

    async def both():
        task = store.dump(hashes, rows)
        first, second = await asyncio.gather(asyncio.wait_for(task, 60), asyncio.wait_for(task, 60))
        assert first.ok
        assert second.ok
        assert (await store.load(hashes, found)).ok

    asyncio.run(both())
    assert_same(found, rows)


def test_tensors_live_until_the_task_is_done(opened):
    store, hashes = opened(), names(8)
    expected = blocks(8, seed=3)
    store.dump(hashes, blocks(8, seed=3))
    gc.collect()
    deadline_s = time.monotonic() + 60
    while store.lookup_on_prefix(hashes) < 8 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    found = empty_like(expected)
    store.load(hashes, found).wait().raise_for_failures()
    assert_same(found, expected)


def test_close_waits_for_tasks(opened):
    store, rows, hashes = opened(), blocks(4), names(4)
    task = store.dump(hashes, rows)
    store.close()
    assert task.done()
    store.close()


def test_namespaces_do_not_see_each_other(opened):
    rows, hashes = blocks(1), names(1)
    store = opened()
    store.dump(hashes, rows).wait().raise_for_failures()
    assert store.drain(30_000)
    store.close()
    assert opened(namespace=NAMESPACE | {"dtype": "float16"}).lookup_on_prefix(hashes) == 0
    assert opened(layout=kvdepot.BlockLayout(1, [512])).lookup_on_prefix(hashes) == 0


def test_reset_forgets(opened):
    store, rows, hashes = opened(), blocks(1), names(1)
    store.dump(hashes, rows).wait().raise_for_failures()
    store.reset()
    assert store.lookup_on_prefix(hashes) == 0
    assert opened().lookup_on_prefix(hashes) == 0


def test_stats_are_numbers(opened):
    assert isinstance(opened().stats(), dict)


@pytest.mark.parametrize(
    ("layout", "namespace", "text"),
    [
        ([], NAMESPACE, "1 to 65536 tensors"),
        ([0], NAMESPACE, "at least one byte"),
        ([1 << 31], NAMESPACE, "at most 1073741824 bytes"),
        ([8], {}, "must describe everything"),
        ([8], {"scale": object()}, "must be text"),
        ([8], {"scale": float("nan")}, "must be text"),
    ],
)
def test_wrong_openings(layout, namespace, text):
    with pytest.raises(kvdepot.ConfigError, match=text):
        kvdepot.open({"pipeline": "Cache", "pool_gb": 0.0625}, layout=layout, namespace=namespace)


def test_fractions_are_no_facts(opened):
    with pytest.raises(kvdepot.ConfigError):
        opened(namespace={"scale": 0.5})


def test_wrong_memory(opened):
    store, rows, hashes = opened(), blocks(1), names(1)
    (row,) = rows
    read_only = np.zeros(512, dtype=np.uint8)
    read_only.flags.writeable = False
    cases = [
        ([], "one row of tensors for each hash, so 1; got 0"),
        ([row[:5]], "row 0 must have 6 tensors, got 5"),
        ([[row[1], *row[1:]]], r"tensor \[0\]\[0\] must have 512 bytes as the layout says, got 256"),
        ([[np.zeros(1024, dtype=np.uint8)[::2], *row[1:]]], r"tensor \[0\]\[0\] is not contiguous"),
        ([[bytes(512), *row[1:]]], "must be a torch tensor or a numpy array, got bytes"),
        (np.zeros((1, 6), dtype=np.int64), "addresses must be uint64"),
        (np.zeros((1, 5), dtype=np.uint64), r"of shape \(1, 6\)"),
        ([[read_only, *row[1:]]], "is read-only, but a load writes it"),
    ]
    for buffers, text in cases:
        with pytest.raises(kvdepot.ConfigError, match=text):
            store.load(hashes, buffers)
    assert store.dump(hashes, [[read_only, *row[1:]]]).wait().ok


def test_tensors_of_torch_are_taken_by_their_face(opened):
    class Tensor:
        def __init__(self, array, device="cpu"):
            self.array = array
            self.device = type("Device", (), {"type": device, "__str__": lambda _: f"{device}:0"})()

        def data_ptr(self):
            return self.array.ctypes.data

        def is_contiguous(self):
            return self.array.flags.c_contiguous

        def numel(self):
            return self.array.size

        def element_size(self):
            return self.array.itemsize

    store, rows, hashes = opened(), blocks(1), names(1)
    found = empty_like(rows)
    store.dump(hashes, [[Tensor(array) for array in rows[0]]]).wait().raise_for_failures()
    store.load(hashes, [[Tensor(array) for array in found[0]]]).wait().raise_for_failures()
    assert_same(found, rows)
    with pytest.raises(kvdepot.UnsupportedError, match="is on cuda:0"):
        store.dump(hashes, [[Tensor(array, "cuda") for array in rows[0]]])
