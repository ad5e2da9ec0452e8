"""``Cache|Posix`` beside fio, both with a file per block that is synced, as on a directory that nodes share."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from benches.peers import fio
from benches.peers.comparison import MEASURED, WARM_UP, Comparison, Outcome, counted, held_bytes
from benches.peers.fio import Fio
from benches.peers.lab import Process, gb_s, removed_at_the_end
from benches.peers.results import Metric
from benches.peers.work import GIB, Shape
from tools.lab.machine import drop_from_page_cache

OURS = "kvdepot Cache|Posix"
YARDSTICKS: Mapping[str, bool] = MappingProxyType({"fio, O_DIRECT": True, "fio, buffered": False})


class Files(Comparison):
    """The comparison."""

    name = "files"
    title = "Posix and fio, a synced file per block (shards x size x blocks)"
    metrics = (
        Metric("write_gb_s", "write GB/s", 3),
        Metric("cold_gb_s", "cold read GB/s", 3),
    )
    # Small enough for a network of some megabytes a second.
    shapes = (Shape(256, 1, 256), Shape(2048, 1, 32))
    smoke_shapes = (Shape(64, 1, 32),)
    ours = (OURS,)
    peers = tuple(YARDSTICKS)
    smoke_sides = (*ours, *peers)

    def missing(self) -> str | None:
        """Returns whether fio is there."""
        return None if fio.version() else "fio: not installed (Debian: fio)"

    def measure(self, side: str, shape: Shape, round_: int) -> Outcome:
        """Writes, and reads in another process with nothing in the page cache."""
        with removed_at_the_end(self.place.disk / f"files-{round_}") as directory:
            if side in YARDSTICKS:
                yardstick = Fio(directory, shape, file_per_block=True, direct=YARDSTICKS[side], synced=True)
                write_s, read_s, counts = yardstick.write().seconds, yardstick.read().seconds, {}
            else:
                with self._process(shape, directory) as process:
                    process.ask("dump", epoch=WARM_UP)
                    dump = process.ask("dump", epoch=MEASURED)
                with self._process(shape, directory) as process:
                    drop_from_page_cache(path for path in directory.rglob("*") if path.is_file())
                    cold = process.ask("load", epoch=MEASURED)
                write_s, read_s, counts = dump["persisted_s"], cold["s"], counted(cold)
        return Outcome({"write_gb_s": gb_s(shape, write_s), "cold_gb_s": gb_s(shape, read_s)}, counts)

    def _process(self, shape: Shape, directory: Path) -> Process:
        settings = {"pipeline": "Cache|Posix", "directories": [str(directory)], "pool_gb": held_bytes(shape) / GIB}
        return Process("benches.peers.kvdepot_side", shape, settings, self.place.logs)
