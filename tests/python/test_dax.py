"""A depot over a DAX medium: blocks are found again when it is reopened."""

import numpy as np
import pytest

import kvdepot

LAYOUT = kvdepot.BlockLayout(shards=2, tensor_sizes_bytes=[512, 256])


@pytest.fixture
def medium(tmp_path):
    path = tmp_path / "medium"
    with path.open("wb") as file:
        file.truncate(16 << 20)
    return path


def opened(medium):
    config = {"pipeline": "Cache|Dax", "dax_device_path": str(medium), "pool_gb": 0.0625, "log_level": "warn"}
    return kvdepot.open(config, layout=LAYOUT, namespace={"model": "tiny", "dtype": "uint8"})


def test_blocks_are_found_again(medium):
    generator = np.random.default_rng(0)
    sizes = LAYOUT.tensor_sizes_bytes * LAYOUT.shards
    rows = [[generator.integers(0, 256, size=size, dtype=np.uint8) for size in sizes] for _ in range(3)]
    hashes = [b"one", b"two", b"three"]
    with opened(medium) as store:
        store.dump(hashes, rows).wait().raise_for_failures()
        assert store.drain(60_000)
    with opened(medium) as store:
        assert store.lookup([*hashes, b"four"]).tolist() == [True] * 3 + [False]
        found = [[np.zeros_like(tensor) for tensor in row] for row in rows]
        store.load(hashes, found).wait().raise_for_failures()
    for row, expected in zip(found, rows, strict=True):
        for tensor, other in zip(row, expected, strict=True):
            np.testing.assert_array_equal(tensor, other)
