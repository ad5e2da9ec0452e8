"""Cost of recording requests and of counting for lite mode, relative to dumping and loading the same blocks."""

import json
import tempfile
from statistics import median
from time import perf_counter, process_time

from kvdepot import _native
from kvdepot.bench.shapes import KIB, MIB, Pages, Shape, hashes, move, open_store

Row = dict[str, object]
REQUEST_BLOCKS = 128
SHAPE = Shape(256, 1, REQUEST_BLOCKS)
"""Smaller blocks than those of most models, so that moving them costs little."""
SMOKE_SHAPE = Shape(4, 1, REQUEST_BLOCKS)
TOKENS = 16
SETTLE_MS = 60_000


def cost(*, rounds: int, shape: Shape = SHAPE, requests: int = 32) -> Row:
    """Returns the cost relative to a dump and a load of a request's blocks, in the caller's time and in processor time.

    In each round, requests with new blocks are moved, recorded and counted in turn.
    """
    pages = Pages(shape)
    config = {"pipeline": "Cache", "pool_bytes": 2 * requests * shape.bytes + 64 * MIB, "eviction": "lru"}
    depot = _native.Depot.embedded(json.dumps(config))
    store = open_store(depot, "traces", shape.layout_json, copy_threads=1)
    pages.register(store)
    meter = _native.Meter("lru", [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18])
    times: list[list[tuple[float, float]]] = []
    with tempfile.TemporaryDirectory() as directory:
        recorder = _native.Recorder(directory, "0-0", block_tokens=TOKENS, file_bytes=64 * MIB, files_max=2)
        for number in range(rounds + 2):
            names = [hashes(number * requests + one, shape.blocks) for one in range(requests)]
            begun = (perf_counter(), process_time())
            for one in names:
                move(store.dump_pages(one, pages.ids))
                move(store.load_pages(one, pages.ids))
            moved = (perf_counter() - begun[0], process_time() - begun[1])
            begun = (perf_counter(), process_time())
            for one in names:
                recorder.record(one, timestamp_ms=0, input_length=TOKENS * shape.blocks, output_length=1)
            recorded = perf_counter() - begun[0]
            while sum(recorder.counters()) < (number + 1) * requests:
                meter.settle(1)  # lets the other thread write
            recorded_cpu = process_time() - begun[1]
            begun = (perf_counter(), process_time())
            for one in names:
                meter.look_up(one)
                meter.store(one)
            counted = perf_counter() - begun[0]
            meter.settle(SETTLE_MS)
            counted_cpu = process_time() - begun[1]
            times.append([moved, (recorded, recorded_cpu), (counted, counted_cpu)])
        recorder.close()
    store.close()
    depot.close()
    times = times[2:]  # the first rounds touch the pool's pages
    blocks = requests * shape.blocks
    return {
        "block_kib": shape.block_bytes // KIB,
        "dump_and_load_us_block": median(t[0][0] for t in times) / blocks * 1e6,
        "trace_us_block": median(t[1][0] for t in times) / blocks * 1e6,
        "lite_us_block": median(t[2][0] for t in times) / blocks * 1e6,
        "trace_percent": median(t[1][0] / t[0][0] for t in times) * 100,
        "lite_percent": median(t[2][0] / t[0][0] for t in times) * 100,
        "trace_cpu_percent": median(t[1][1] / t[0][1] for t in times) * 100,
        "lite_cpu_percent": median(t[2][1] / t[0][1] for t in times) * 100,
    }
