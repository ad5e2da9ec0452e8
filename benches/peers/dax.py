"""LMCache's DAX backend and kvdepot's ``Cache|Dax``, each over a file of its own on tmpfs, beside memcpy.

kvdepot takes part five times: with loads through its pool, as GPUs need them, from a mapping of the file (the default)
and with system calls (``dax_access: pread``); with blocks leased in place, as engines on processors get them from
devices; and through its pool with ``dax_verify: first_read``, in both ways, where what is measured was read before and
has left the pool since.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benches.peers.comparison import MEASURED, WARM_UP, Comparison, Outcome, counted
from benches.peers.lab import Environment, Process, gb_s, removed_at_the_end, write_zeros
from benches.peers.results import Metric
from benches.peers.work import GIB, MIB, Shape

LMCACHE = Environment(
    name="LMCache",
    directory=".venv-infinistore",
    target="vllm-env infinistore-env",
    # Importing them takes seconds.
    probe="import importlib.util as u, importlib.metadata as m; "
    "assert u.find_spec('torch'), 'torch is missing: run make vllm-env'; print(m.version('lmcache'))",
    environ={"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0", "LMCACHE_LOG_LEVEL": "ERROR"},
)
OURS, IN_PLACE, TRUSTING = "kvdepot", "kvdepot, in place", "kvdepot, first_read"
CALLS, TRUSTING_CALLS = "kvdepot, pread", "kvdepot, pread, first_read"
FIRST_READ = (TRUSTING, TRUSTING_CALLS)
BACKEND, SERVER = "LMCache, backend", "LMCache, core"
CORES = len(os.sched_getaffinity(0))
MEDIUM_EPOCHS = 12
"""An eighth of the medium, more than an epoch, may hold blocks that are leased in place ahead of their load."""
POOL_EPOCHS = 5
"""A claim gets a quarter of the pool at most."""
OTHERS = range(MEASURED + 1, MEASURED + 2 + POOL_EPOCHS)
"""Epochs that push the measured one out of the pool, which has room for less than these."""


class Dax(Comparison):
    """The comparison."""

    name = "dax"
    title = "Dax beside LMCache's (chunks of one shard)"
    metrics = (
        Metric("store_gb_s", "store GB/s"),
        Metric("restore_gb_s", "restore GB/s"),
        Metric("load_gb_s", "load GB/s"),
        Metric("memcpy_gb_s", f"memcpy, {CORES} threads GB/s"),
        Metric("store_of_memcpy", "store / memcpy"),
        Metric("restore_of_memcpy", "restore / memcpy"),
        Metric("load_of_memcpy", "load / memcpy"),
    )
    shapes = (Shape(256, 1, 1024), Shape(1024, 1, 256), Shape(4096, 1, 64), Shape(14 * 1024, 1, 18))
    smoke_shapes = (Shape(256, 1, 8),)
    ours = (OURS, IN_PLACE, TRUSTING, CALLS, TRUSTING_CALLS)
    peers = (BACKEND, SERVER)
    needs = MappingProxyType(dict.fromkeys(peers, LMCACHE))
    smoke_sides = (*ours, BACKEND)

    def measure(self, side: str, shape: Shape, round_: int) -> Outcome:
        """Stores twice, restores and loads; the second of each counts, since the first touches memory."""
        with removed_at_the_end(self.place.memory / f"dax-{round_}") as directory:
            medium = directory / "medium"
            # A device's memory is there before anybody writes to it.
            write_zeros(medium, MEDIUM_EPOCHS * shape.bytes + 64 * MIB)
            if side in self.ours:
                return self._ours(shape, medium, side)
            return self._theirs(side, shape, medium)

    def _ours(self, shape: Shape, medium: Path, side: str) -> Outcome:
        def process() -> Process:
            pool = POOL_EPOCHS * shape.bytes + 64 * MIB
            settings = {"pipeline": "Cache|Dax", "dax_device_path": str(medium), "pool_gb": pool / GIB}
            settings["dax_lease_in_place"] = side == IN_PLACE
            settings["dax_access"] = "pread" if side in (CALLS, TRUSTING_CALLS) else "mapped"
            if side in FIRST_READ:
                settings["dax_verify"] = "first_read"
            return Process("benches.peers.kvdepot_side", shape, settings, self.place.logs)

        with process() as one:
            one.ask("dump", epoch=WARM_UP)
            dump = one.ask("dump", epoch=MEASURED)
            copy = one.ask("memcpy", threads=CORES)
            if side in FIRST_READ:
                for epoch in OTHERS:
                    one.ask("dump", epoch=epoch)
        with process() as one:
            one.ask("restore", epoch=WARM_UP)
            read_before(one, side)
            restore = one.ask("restore", epoch=MEASURED)
        with process() as one:
            warm = one.ask("load", epoch=WARM_UP)
            read_before(one, side)
            load = one.ask("load", epoch=MEASURED)
        return outcome(shape, dump, restore, copy, warm, load)

    def _theirs(self, side: str, shape: Shape, medium: Path) -> Outcome:
        settings = {"medium": str(medium), "medium_bytes": medium.stat().st_size, "core": side == SERVER}
        settings |= {"workers": CORES, "memory_bytes": POOL_EPOCHS * shape.bytes + 256 * MIB}
        # Nothing of it survives a restart, so all is done in one process.
        with Process("benches.peers.lmcache_side", shape, settings, self.place.logs, LMCACHE) as one:
            one.ask("dump", epoch=WARM_UP)
            dump = one.ask("dump", epoch=MEASURED)
            one.ask("restore", epoch=WARM_UP)
            restore = one.ask("restore", epoch=MEASURED)
            warm = one.ask("load", epoch=WARM_UP)
            load = one.ask("load", epoch=MEASURED)
            copy = one.ask("memcpy", threads=CORES)
        return outcome(shape, dump, restore, copy, warm, load)


def read_before(one: Process, side: str) -> None:
    """Makes a depot that compares checksums once do so, and lose what it has read from its pool."""
    for epoch in (MEASURED, *OTHERS) if side in FIRST_READ else ():
        one.ask("restore", epoch=epoch)


def outcome(
    shape: Shape,
    dump: Mapping[str, Any],
    restore: Mapping[str, Any],
    copy: Mapping[str, Any],
    warm: dict[str, Any],
    load: dict[str, Any],
) -> Outcome:
    """Returns the rates of one round, and their share of memcpy's in the same process."""
    sample = {
        "store_gb_s": gb_s(shape, dump["persisted_s"]),
        "restore_gb_s": gb_s(shape, restore["s"]),
        "load_gb_s": gb_s(shape, load["s"]),
        "memcpy_gb_s": gb_s(shape, copy["s"]),
        "store_of_memcpy": copy["s"] / dump["persisted_s"],
        "restore_of_memcpy": copy["s"] / restore["s"],
        "load_of_memcpy": copy["s"] / load["s"],
    }
    return Outcome(sample, counted(warm, load))
