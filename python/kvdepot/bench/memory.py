"""Dump into and load from a warm pool, compared with memcpy; lookups through the Unix socket."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np

from kvdepot import _native
from kvdepot.bench.served import served
from kvdepot.bench.shapes import MIB, Pages, PlainCopy, Shape, hashes, move, open_store, seconds

Row = dict[str, object]

LOOKUP_HASHES = 128
BATCH_HASHES = 4096
KEYS = 100_000
SMOKE_KEYS = 1_000


def moved(begin: Callable[..., _native.Task], names: list[bytes], pages: Pages) -> None:
    """Dumps or loads all pages."""
    move(begin(names, pages.ids))


def warm(shapes: Sequence[Shape], *, rounds: int, threads: int) -> Iterator[Row]:
    """Yields one row per shape: GB/s of memcpy, dump and load, and the medians of the ratios."""
    for shape in shapes:
        pages = Pages(shape)
        config = {"pipeline": "Cache", "pool_bytes": 3 * shape.bytes + 64 * MIB, "eviction": "lru"}
        depot = _native.Depot.embedded(json.dumps(config))
        store = open_store(depot, "memory", shape.layout_json, copy_threads=threads)
        pages.register(store)
        copy = PlainCopy(pages.memory, threads=threads)
        times: list[tuple[float, float, float]] = []
        for number in range(rounds + 3):
            names = hashes(number, shape.blocks)
            dump = partial(moved, store.dump_pages, names, pages)
            load = partial(moved, store.load_pages, names, pages)
            times.append((seconds(copy), seconds(dump), seconds(load)))
        times = times[3:]  # the first rounds touch the pool's pages
        gigabytes = shape.bytes / 1e9
        yield {
            "shard_kib": shape.shard_kib,
            "shards": shape.shards,
            "blocks": shape.blocks,
            "memcpy_gb_s": gigabytes / median(t[0] for t in times),
            "dump_gb_s": gigabytes / median(t[1] for t in times),
            "load_gb_s": gigabytes / median(t[2] for t in times),
            "dump_ratio": median(t[0] / t[1] for t in times),
            "load_ratio": median(t[0] / t[2] for t in times),
        }
        store.close()
        depot.close()


def door(*, rounds: int, keys: int) -> Row:
    """Measures a prefix lookup of 128 hashes through the Unix socket, in microseconds, and keys per second in batch."""
    with served({"pipeline": "Cache", "pool_bytes": keys * 4096 + 64 * MIB}) as running:
        store = open_store(running.depot, "door", "[[1,[64]]]", copy_threads=1)
        memory = np.zeros((1, 64), np.uint8)
        store.register_pages(np.array([memory.ctypes.data], np.uint64), np.zeros(1, np.int64), keys)
        names = hashes(0, keys)
        for start in range(0, keys, BATCH_HASHES):
            batch = names[start : start + BATCH_HASHES]
            move(store.dump_pages(batch, np.arange(len(batch), dtype=np.int64)))
        few = names[:LOOKUP_HASHES]
        calls = []
        for _ in range(200 * rounds):
            begun = perf_counter()
            found = store.lookup_on_prefix(few)
            calls.append(perf_counter() - begun)
            if found != LOOKUP_HASHES:
                raise RuntimeError(f"{found} of {LOOKUP_HASHES} keys found")
        rates = []
        for _ in range(rounds):
            begun = perf_counter()
            for start in range(0, keys, BATCH_HASHES):
                store.lookup(names[start : start + BATCH_HASHES])
            rates.append(keys / (perf_counter() - begun))
        calls.sort()
        return {
            "lookup_128_p50_us": calls[len(calls) // 2] * 1e6,
            "lookup_128_p99_us": calls[len(calls) * 99 // 100] * 1e6,
            "keys_per_s": median(rates),
        }
