"""kvdepot beside fio and UCM's ``Cache|Posix``, all with a file per block, as on a directory that nodes share.

fio and kvdepot sync each file on such a directory. UCM never does, but NFS writes a file back when it is closed.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benches.peers.comparison import MEASURED, WARM_UP, Comparison, Outcome, counted, held_bytes
from benches.peers.fio import FIO, Fio
from benches.peers.lab import Process, gb_s, removed_at_the_end
from benches.peers.results import Metric
from benches.peers.ucm import UCM, ucm_process
from benches.peers.work import GIB, Shape
from tools.lab.machine import drop_from_page_cache

OURS: Mapping[str, str] = MappingProxyType(
    {
        "kvdepot Cache|Posix": "Cache|Posix",
        # The pipeline of `ucm_connector_name: UcmNfsStore`.
        "kvdepot Staging|Posix": "Staging|Posix",
    },
)
THEIRS: Mapping[str, dict[str, Any]] = MappingProxyType({"UCM": {}, "UCM, io_direct": {"io_direct": True}})
YARDSTICKS: Mapping[str, bool] = MappingProxyType({"fio, O_DIRECT": True, "fio, buffered": False})


class Files(Comparison):
    """The comparison."""

    name = "files"
    title = "Posix, fio and UCM, a file per block (shards x size x blocks)"
    metrics = (
        Metric("write_gb_s", "write GB/s", 3),
        Metric("cold_gb_s", "cold read GB/s", 3),
    )
    # Small enough for a network of some megabytes a second.
    shapes = (Shape(256, 1, 256), Shape(2048, 1, 32))
    smoke_shapes = (Shape(64, 1, 32),)
    ours = tuple(OURS)
    peers = (*YARDSTICKS, *THEIRS)
    needs = MappingProxyType({**dict.fromkeys(YARDSTICKS, FIO), **dict.fromkeys(THEIRS, UCM)})
    smoke_sides = (*OURS, *YARDSTICKS, "UCM")

    def measure(self, side: str, shape: Shape, round_: int) -> Outcome:
        """Writes, and reads in another process with nothing in the page cache."""
        with removed_at_the_end(self.place.disk / f"files-{round_}") as directory:
            if side in YARDSTICKS:
                yardstick = Fio(directory, shape, file_per_block=True, direct=YARDSTICKS[side], synced=True)
                write_s, read_s, counts = yardstick.write().seconds, yardstick.read().seconds, {}
            else:
                with self._process(side, shape, directory) as process:
                    process.ask("dump", epoch=WARM_UP)
                    dump = process.ask("dump", epoch=MEASURED)
                with self._process(side, shape, directory) as process:
                    drop_from_page_cache(path for path in directory.rglob("*") if path.is_file())
                    cold = process.ask("load", epoch=MEASURED)
                write_s, read_s, counts = dump["persisted_s"], cold["s"], counted(cold)
        return Outcome({"write_gb_s": gb_s(shape, write_s), "cold_gb_s": gb_s(shape, read_s)}, counts)

    def _process(self, side: str, shape: Shape, directory: Path) -> Process:
        if side in THEIRS:
            return ucm_process(shape, directory, THEIRS[side], self.place.logs, smoke=self.smoke)
        settings = {"pipeline": OURS[side], "directories": [str(directory)], "pool_gb": held_bytes(shape) / GIB}
        return Process("benches.peers.kvdepot_side", shape, settings, self.place.logs)
