"""Cold loads from files, compared with fio reading files of the same sizes at the same depth."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

import numpy as np

from kvdepot import _native
from kvdepot.bench.shapes import MIB, Pages, Shape, hashes, move, open_store, seconds

Row = dict[str, object]

SHAPES = (Shape(256, 1, 1024), Shape(1024, 1, 256), Shape(4096, 1, 64), Shape(64, 32, 128))
DRAIN_MS = 120_000
REMOVE_S = 10


def drop_from_page_cache(directory: str) -> None:
    """Writes back and drops the cached pages of every file below ``directory``."""
    for folder, _, files in os.walk(directory):
        for name in files:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def fio_read_s(directory: str, shape: Shape, *, threads: int, direct: bool) -> float | None:
    """Returns the seconds that fio takes to read files of these sizes with ``threads`` threads; None without fio."""
    fio = shutil.which("fio")
    if fio is None:
        return None
    per_thread = max(1, shape.blocks // threads)
    common = [
        fio,
        "--name=read",
        f"--directory={directory}",
        f"--numjobs={threads}",
        "--thread",
        f"--nrfiles={per_thread}",
        f"--filesize={shape.block_bytes}",
        f"--bs={min(shape.block_bytes, MIB)}",
        "--ioengine=psync",
        f"--direct={int(direct)}",
        "--file_service_type=sequential",
        "--group_reporting",
        "--output-format=json",
    ]
    subprocess.run([*common, "--rw=read", "--create_only=1"], check=True, capture_output=True)
    drop_from_page_cache(directory)
    done = subprocess.run([*common, "--rw=read"], check=True, capture_output=True, text=True)
    read = json.loads(done.stdout)["jobs"][0]["read"]
    return float(read["runtime"]) / 1e3 * shape.bytes / float(read["io_bytes"])


@contextmanager
def scratch(directory: str | None) -> Iterator[str]:
    """Yields a temporary directory and removes it at the end, even if threads of a closed depot still write there."""
    root = tempfile.mkdtemp(dir=directory, prefix="kvdepot-bench-")
    try:
        yield root
    finally:
        end_s = time.monotonic() + REMOVE_S
        while os.path.exists(root):
            shutil.rmtree(root, ignore_errors=time.monotonic() < end_s)


def cold(shapes: Sequence[Shape], directory: str | None, *, rounds: int, threads: int) -> Iterator[Row]:
    """Yields one row per shape and way of reading: GB/s to disk and cold from disk, and the ratio to fio."""
    for direct in (True, False):
        for shape in shapes:
            with scratch(directory) as root:
                yield _cold(root, shape, direct=direct, rounds=rounds, threads=threads)


def _cold(root: str, shape: Shape, *, direct: bool, rounds: int, threads: int) -> Row:
    blocks, raw = os.path.join(root, "blocks"), os.path.join(root, "raw")
    os.makedirs(blocks)
    os.makedirs(raw)
    pages = Pages(shape)
    expected = pages.memory.copy()
    posix = {"directories": [blocks], "io_direct": direct, "read_threads": threads, "write_threads": threads}
    config = json.dumps({"pipeline": "Cache|Posix", "pool_bytes": 2 * shape.bytes + 64 * MIB, "posix": posix})
    names = hashes(0, shape.blocks)

    def attach() -> tuple[_native.Depot, _native.Store]:
        depot = _native.Depot.embedded(config)
        store = open_store(depot, "disk", shape.layout_json, copy_threads=1)
        pages.register(store)
        return depot, store

    depot, store = attach()

    def write() -> None:
        move(store.dump_pages(names, pages.ids))
        depot.drain(DRAIN_MS)

    written = seconds(write)
    store.close()
    depot.close()
    loads: list[float] = []
    reads: list[float | None] = []
    for _ in range(rounds):
        depot, store = attach()
        touch_pool(store, shape, pages)
        depot.drain(DRAIN_MS)
        drop_from_page_cache(blocks)
        pages.memory[:] = 0
        loads.append(seconds(partial(load, store, names, pages)))
        if not np.array_equal(pages.memory, expected):
            raise RuntimeError("wrong bytes came back")
        store.close()
        depot.close()
        reads.append(fio_read_s(raw, shape, threads=threads, direct=direct))
    gigabytes = shape.bytes / 1e9
    ratios = [read / load for read, load in zip(reads, loads, strict=True) if read is not None]
    return {
        "block_kib": shape.block_bytes // 1024,
        "shards": shape.shards,
        "blocks": shape.blocks,
        "read": "O_DIRECT" if direct else "buffered",
        "threads": threads,
        "to_disk_gb_s": gigabytes / written,
        "cold_load_gb_s": gigabytes / median(loads),
        "fio_gb_s": gigabytes / median(r for r in reads if r is not None) if ratios else None,
        "ratio": median(ratios) if ratios else None,
    }


def load(store: _native.Store, names: list[bytes], pages: Pages) -> None:
    """Loads all pages."""
    move(store.load_pages(names, pages.ids))


def touch_pool(store: _native.Store, shape: Shape, pages: Pages) -> None:
    """Fills the pool once, so that the measured load causes no page faults of first use."""
    filler = hashes(1 << 20, shape.blocks)
    store.dump_pages(filler, pages.ids).wait()
