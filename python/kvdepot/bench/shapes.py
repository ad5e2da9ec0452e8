"""The data that benchmarks move: blocks of shards in numpy memory, and the plain copy they are compared with."""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import numpy.typing as npt

from kvdepot import _native

KIB = 1 << 10
MIB = 1 << 20
TASK_MS = 120_000


@dataclass(frozen=True)
class Shape:
    """Blocks of ``shards`` equal shards."""

    shard_kib: int
    shards: int
    blocks: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.shard_kib * KIB * self.shards

    @property
    def bytes(self) -> int:
        """Bytes of all blocks."""
        return self.block_bytes * self.blocks

    @property
    def layout_json(self) -> str:
        """Layout as the core reads it."""
        return json.dumps([[self.shards, [self.shard_kib * KIB]]])


SHAPES = (
    Shape(4, 32, 1024),
    Shape(64, 1, 2048),
    Shape(64, 32, 64),
    Shape(256, 32, 32),
    Shape(1024, 16, 16),
    Shape(4096, 1, 64),
)

SMOKE_SHAPES = (Shape(4, 2, 8), Shape(64, 1, 4))
"""Small enough to show in a second that a benchmark runs; the figures mean nothing."""


def hashes(seed: int, count: int) -> list[bytes]:
    """Returns distinct 32-byte hashes, as vLLM makes them."""
    return [hashlib.sha256(f"{seed}/{index}".encode()).digest() for index in range(count)]


class Pages:
    """Device memory of the benchmark: one array, a page per block, a tensor per shard, layers outermost as in vLLM."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        shard_bytes = shape.shard_kib * KIB
        self.memory = np.random.default_rng(1).integers(0, 256, (shape.shards, shape.blocks, shard_bytes), np.uint8)
        self.ids = np.arange(shape.blocks, dtype=np.int64)

    def register(self, store: _native.Store) -> None:
        """Registers the pages with a store."""
        base = self.memory.ctypes.data
        layer, page = self.memory.strides[:2]
        bases = base + layer * np.arange(self.shape.shards, dtype=np.uint64)
        store.register_pages(bases.astype(np.uint64), np.full(self.shape.shards, page, np.int64), self.shape.blocks)


def open_store(depot: _native.Depot, bench: str, layout_json: str, *, copy_threads: int) -> _native.Store:
    """Opens a store of the benchmark ``bench``, whose copies use ``copy_threads`` threads, including the caller."""
    namespace = depot.open_namespace(json.dumps({"bench": bench}), layout_json)
    return depot.store(namespace, timeout_ms=TASK_MS, copy_json=json.dumps({"copy_threads": copy_threads}))


class PlainCopy:
    """memcpy of the same bytes by the same number of threads, to memory that has been touched before."""

    def __init__(self, source: npt.NDArray[np.uint8], *, threads: int) -> None:
        flat = source.reshape(-1)
        self.source = np.array_split(flat, threads)
        self.target = np.array_split(np.ones_like(flat), threads)
        self.pool = ThreadPoolExecutor(threads)

    def __call__(self) -> None:
        """Copies all bytes once."""
        list(self.pool.map(np.copyto, self.target, self.source))


def seconds(work: Callable[[], object]) -> float:
    """Returns how long ``work`` takes."""
    begun = perf_counter()
    work()
    return perf_counter() - begun


def move(task: _native.Task) -> None:
    """Waits for a task and checks that all of its blocks arrive."""
    task.wait()
    failures = task.failures()
    if failures:
        raise RuntimeError(f"{sum(failures.values())} blocks did not arrive: {failures}")
