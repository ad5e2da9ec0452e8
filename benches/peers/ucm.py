"""UCM's ``Cache|Posix`` and kvdepot's, each in an engine's process: dumps, loads by where the blocks are, lookups."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benches.peers.comparison import MEASURED, WARM_UP, Comparison, Outcome, counted, held_bytes
from benches.peers.lab import Environment, Process, gb_s, prepare_page_cache, removed_at_the_end, s_per_gb
from benches.peers.results import Metric
from benches.peers.work import GIB, Shape
from tools.lab.machine import drop_from_page_cache

UCM = Environment(
    name="UCM",
    directory=".venv-ucm",
    target="ucm-env",
    probe="import benches.peers.ucm_side as side; print(side.version())",
    environ={"LD_LIBRARY_PATH": "{root}/lib-cuda", "UCM_LOG_LEVEL": "error", "ENABLE_UCM_PATCH": "0"},
)
OURS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {"kvdepot": {}, "kvdepot, io_direct": {"io_direct": True}},
)
THEIRS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "UCM": {},
        "UCM, io_direct": {"io_direct": True},
        "UCM, aio": {"posix_io_engine": "aio", "io_direct": True},
    },
)
UCM_SLOTS = 4096


class Ucm(Comparison):
    """The comparison."""

    name = "ucm"
    title = "Cache|Posix beside UCM's (shards x size x blocks)"
    metrics = (
        Metric("ack_gb_s", "dump acknowledged GB/s"),
        Metric("persisted_gb_s", "persisted GB/s"),
        Metric("warm_gb_s", "load, memory GB/s"),
        Metric("page_cache_gb_s", "load, page cache GB/s"),
        Metric("cold_gb_s", "load, cold GB/s"),
        Metric("dump_cpu_s_gb", "dump CPU s/GB", rate=False),
        Metric("cold_cpu_s_gb", "cold CPU s/GB", rate=False),
        Metric("lookup_memory_us", "lookup, memory us", 1, rate=False),
        Metric("lookup_disk_us", "lookup, disk us", 1, rate=False),
        Metric("lookup_absent_us", "lookup, absent us", 1, rate=False),
    )
    shapes = (Shape(256, 32, 64), Shape(1024, 1, 512), Shape(4, 32, 512), Shape(2048, 1, 256))
    smoke_shapes = (Shape(4, 4, 32),)
    ours = tuple(OURS)
    peers = tuple(THEIRS)
    needs = MappingProxyType(dict.fromkeys(peers, UCM))
    smoke_sides = ("kvdepot", "UCM")

    def measure(self, side: str, shape: Shape, round_: int) -> Outcome:
        """Dumps in one process, and loads in two others: from the page cache, and from the disk."""
        with removed_at_the_end(self.place.disk / f"ucm-{round_}") as directory:
            with self._process(side, shape, directory) as process:
                prepare_page_cache(self.place.disk, 2 * shape.bytes)
                process.ask("dump", epoch=WARM_UP)
                dump = process.ask("dump", epoch=MEASURED)
                warm = process.ask("load", epoch=MEASURED)
                in_memory = process.ask("lookup", epoch=MEASURED, there=True)
            with self._process(side, shape, directory) as process:
                on_disk = process.ask("lookup", epoch=MEASURED, there=True)
                absent = process.ask("lookup", epoch=MEASURED, there=False)
                cached = process.ask("load", epoch=MEASURED)
            with self._process(side, shape, directory) as process:
                drop_from_page_cache(path for path in directory.rglob("*") if path.is_file())
                prepare_page_cache(self.place.disk, shape.bytes)
                cold = process.ask("load", epoch=MEASURED)
        sample = {
            "ack_gb_s": gb_s(shape, dump["ack_s"]),
            "persisted_gb_s": gb_s(shape, dump["persisted_s"]),
            "warm_gb_s": gb_s(shape, warm["s"]),
            "page_cache_gb_s": gb_s(shape, cached["s"]),
            "cold_gb_s": gb_s(shape, cold["s"]),
            "dump_cpu_s_gb": s_per_gb(shape, dump["cpu_s"]),
            "cold_cpu_s_gb": s_per_gb(shape, cold["cpu_s"]),
            "lookup_memory_us": in_memory["p50_us"],
            "lookup_disk_us": on_disk["p50_us"],
            "lookup_absent_us": absent["p50_us"],
        }
        return Outcome(sample, counted(warm, cached, cold))

    def _process(self, side: str, shape: Shape, directory: Path) -> Process:
        if side in OURS:
            settings = {"pipeline": "Cache|Posix", "directories": [str(directory)], "pool_gb": held_bytes(shape) / GIB}
            return Process("benches.peers.kvdepot_side", shape, {**settings, **OURS[side]}, self.place.logs)
        return ucm_process(shape, directory, THEIRS[side], self.place.logs, smoke=self.smoke)


def ucm_process(shape: Shape, directory: Path, settings: Mapping[str, Any], logs: Path, *, smoke: bool) -> Process:
    """Starts UCM's ``Cache|Posix`` over a directory. ``settings`` are keys of its configuration."""
    # Whole gibibytes, and a number of slots below which it refuses to start.
    gib = -(-max(held_bytes(shape), UCM_SLOTS * shape.shard_bytes) // GIB)
    # With its default of 3 digits it makes 4,096 directories first.
    digits = {"data_dir_shard_bytes": 1} if smoke else {}
    settings = {"storage_backends": [str(directory)], "cache_buffer_capacity_gb": gib, **settings, **digits}
    return Process("benches.peers.ucm_side", shape, settings, logs, UCM)
