"""One slab file and one file per block, each with fio beside it: writes, cold reads, processor time."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benches.peers.comparison import HELD, MEASURED, WARM_UP, Comparison, Outcome, counted, held_bytes
from benches.peers.fio import FIO, Fio
from benches.peers.lab import Process, gb_s, prepare_page_cache, removed_at_the_end, s_per_gb
from benches.peers.results import Metric
from benches.peers.work import GIB, MIB, Shape
from tools.lab.machine import drop_from_page_cache

SLAB, POSIX = "kvdepot Cache|Slab", "kvdepot Cache|Posix"
YARDSTICKS: Mapping[str, dict[str, bool]] = MappingProxyType(
    {
        "fio, a file per thread, O_DIRECT, synced": {"file_per_block": False, "direct": True},
        "fio, a file per block, buffered": {"file_per_block": True, "direct": False},
    }
)
SEGMENTS_BYTES = 768 * MIB
"""The segment that is written, one to clean, and what a start needs, beyond the blocks."""


class Slab(Comparison):
    """The comparison."""

    name = "slab"
    title = "Slab, Posix and fio (shards x size x blocks)"
    metrics = (
        Metric("write_gb_s", "write GB/s"),
        Metric("write_cpu_s_gb", "write CPU s/GB", rate=False),
        Metric("cold_gb_s", "cold read GB/s"),
        Metric("cold_cpu_s_gb", "cold read CPU s/GB", rate=False),
    )
    shapes = (Shape(64, 1, 4096), Shape(256, 1, 1024), Shape(2048, 1, 256))
    smoke_shapes = (Shape(64, 1, 32),)
    ours = (SLAB, POSIX)
    peers = tuple(YARDSTICKS)
    needs = MappingProxyType(dict.fromkeys(peers, FIO))
    smoke_sides = (*ours, *peers)

    def measure(self, side: str, shape: Shape, round_: int) -> Outcome:
        """Writes, and reads in another process with nothing in the page cache."""
        with removed_at_the_end(self.place.disk / f"slab-{round_}") as directory:
            if side in YARDSTICKS:
                return self._fio(side, shape, directory)
            with self._process(side, shape, directory) as process:
                prepare_page_cache(self.place.disk, 2 * shape.bytes)
                process.ask("dump", epoch=WARM_UP)
                dump = process.ask("dump", epoch=MEASURED)
            with self._process(side, shape, directory) as process:
                drop_from_page_cache(path for path in directory.rglob("*") if path.is_file())
                cold = process.ask("load", epoch=MEASURED)
        return Outcome(sample(shape, dump["persisted_s"], dump["cpu_s"], cold["s"], cold["cpu_s"]), counted(cold))

    def _fio(self, side: str, shape: Shape, directory: Path) -> Outcome:
        yardstick = Fio(directory, shape, **YARDSTICKS[side])
        prepare_page_cache(self.place.disk, shape.bytes)
        written = yardstick.write()
        read = yardstick.read()
        return Outcome(sample(shape, written.seconds, written.cpu_s, read.seconds, read.cpu_s), {})

    def _process(self, side: str, shape: Shape, directory: Path) -> Process:
        settings: dict[str, Any] = {"pool_gb": held_bytes(shape) / GIB}
        if side == SLAB:
            capacity = (HELD * shape.bytes + SEGMENTS_BYTES) / GIB
            settings |= {"slab_path": str(directory / "slab"), "slab_capacity_gb": capacity}
        else:
            settings |= {"directories": [str(directory)]}
        pipeline = side.partition(" ")[2]
        return Process("benches.peers.kvdepot_side", shape, {"pipeline": pipeline, **settings}, self.place.logs)


def sample(shape: Shape, write_s: float, write_cpu_s: float, read_s: float, read_cpu_s: float) -> dict[str, float]:
    """Returns the figures of one round."""
    return {
        "write_gb_s": gb_s(shape, write_s),
        "write_cpu_s_gb": s_per_gb(shape, write_cpu_s),
        "cold_gb_s": gb_s(shape, read_s),
        "cold_cpu_s_gb": s_per_gb(shape, read_cpu_s),
    }
