"""Cost of metrics, traces and lite mode, relative to dumping and loading the same blocks."""

import tempfile
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time

from kvdepot import _native
from kvdepot.bench.served import Served, served
from kvdepot.bench.shapes import KIB, MIB, Pages, Shape, hashes, move, open_store

Row = dict[str, object]
REQUEST_BLOCKS = 128
SHAPE = Shape(256, 1, REQUEST_BLOCKS)
"""Smaller blocks than those of most models, so that moving them costs little."""
SMOKE_SHAPE = Shape(4, 1, REQUEST_BLOCKS)
TOKENS = 16
SETTLE_MS = 60_000
SCRAPES = 100
"""Scrapes in a round: enough for the kernel's clock of processor time."""


@dataclass(frozen=True)
class Spent:
    """Time of the caller, and of processors in this process and in the depot's."""

    wall_s: float
    processor_s: float


class Watch:
    """Measures one after another."""

    def __init__(self, depot: Served) -> None:
        self._depot = depot
        self.restart()

    def restart(self) -> None:
        """Begins a measurement."""
        self._begun, self._processor = perf_counter(), process_time() + self._depot.processor_s()

    def processor_s(self) -> float:
        """Returns the processor time since then, of this process and the depot's."""
        return process_time() + self._depot.processor_s() - self._processor

    def wall_s(self) -> float:
        """Returns the time since then."""
        return perf_counter() - self._begun

    def spent(self) -> Spent:
        """Returns both."""
        return Spent(self.wall_s(), self.processor_s())


@dataclass(frozen=True)
class Round:
    """What one round took: moving requests' blocks, recording the requests, counting them, and a scrape."""

    moved: Spent
    recorded: Spent
    counted: Spent
    scraped: Spent

    def scrapes(self) -> float:
        """Returns the scrapes that come while the blocks move, at one a second."""
        return self.moved.wall_s


def cost(*, rounds: int, shape: Shape = SHAPE, requests: int = 32, scrapes: int = SCRAPES) -> Row:
    """Returns the cost relative to a dump and a load of a request's blocks, in the caller's time and in processor time.

    In each round, requests with new blocks are moved, recorded and counted in turn, and the depot's metrics are
    scraped. A scraper asks once a second, so a round costs as many scrapes as its moves take seconds. The sum is that
    of all three.
    """
    pages = Pages(shape)
    config: dict[str, object] = {"pipeline": "Cache", "eviction": "lru"}
    config["pool_bytes"] = 2 * requests * shape.bytes + 64 * MIB
    meter = _native.Meter("lru", [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18])
    done: list[Round] = []
    with served(config) as running, tempfile.TemporaryDirectory() as directory:
        store = open_store(running.depot, "traces", shape.layout_json, copy_threads=1)
        pages.register(store)
        recorder = _native.Recorder(directory, "0-0", block_tokens=TOKENS, file_bytes=64 * MIB, files_max=2)
        watch = Watch(running)
        for number in range(rounds + 2):
            names = [hashes(number * requests + one, shape.blocks) for one in range(requests)]
            watch.restart()
            for one in names:
                move(store.dump_pages(one, pages.ids))
                move(store.load_pages(one, pages.ids))
            moved = watch.spent()
            watch.restart()
            for one in names:
                recorder.record(one, timestamp_ms=0, input_length=TOKENS * shape.blocks, output_length=1)
            recorded_s = watch.wall_s()
            while sum(recorder.counters()) < (number + 1) * requests:
                meter.settle(1)  # lets the other thread write
            recorded = Spent(recorded_s, watch.processor_s())
            watch.restart()
            for one in names:
                meter.look_up(one)
                meter.store(one)
            counted_s = watch.wall_s()
            meter.settle(SETTLE_MS)
            counted = Spent(counted_s, watch.processor_s())
            watch.restart()
            for _ in range(scrapes):
                running.scrape()
            all_scraped = watch.spent()
            scraped = Spent(all_scraped.wall_s / scrapes, all_scraped.processor_s / scrapes)
            done.append(Round(moved, recorded, counted, scraped))
        recorder.close()
        store.close()
    return row(done[2:], shape, requests)  # the first rounds touch the pool's pages


def row(done: list[Round], shape: Shape, requests: int) -> Row:
    """Returns the medians of all rounds."""
    blocks = requests * shape.blocks
    wall = [
        (one.recorded.wall_s, one.counted.wall_s, one.scrapes() * one.scraped.wall_s, one.moved.wall_s) for one in done
    ]
    processors = [
        (
            one.recorded.processor_s,
            one.counted.processor_s,
            one.scrapes() * one.scraped.processor_s,
            one.moved.processor_s,
        )
        for one in done
    ]
    told: Row = {
        "block_kib": shape.block_bytes // KIB,
        "dump_and_load_us_block": median(one.moved.wall_s for one in done) / blocks * 1e6,
        "trace_us_block": median(one.recorded.wall_s for one in done) / blocks * 1e6,
        "lite_us_block": median(one.counted.wall_s for one in done) / blocks * 1e6,
        "scrape_ms": median(one.scraped.wall_s for one in done) * 1e3,
    }
    for unit, times in (("percent", wall), ("cpu_percent", processors)):
        for place, part in enumerate(("trace", "lite", "metrics")):
            told[f"{part}_{unit}"] = median(spent[place] / spent[3] for spent in times) * 100
        told[f"all_{unit}"] = median(sum(spent[:3]) / spent[3] for spent in times) * 100
    return told
