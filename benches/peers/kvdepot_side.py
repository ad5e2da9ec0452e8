"""kvdepot, as an engine in the same process uses it: pages are registered once, and calls name blocks and pages."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benches.peers.side import Side, serve
from benches.peers.work import GIB
from kvdepot import _native
from kvdepot.config import load_config

TASK_MS = 120_000
POPULATED_S = 20.0
POLL_S = 0.01


class KVDepotSide(Side):
    """An embedded depot."""

    def open(self, settings: dict[str, Any]) -> None:
        """Opens it. ``settings`` are keys of kvdepot's configuration; all others keep their defaults."""
        shape = self.blocks.shape
        before = resident_bytes()
        config = load_config({"log_level": "warn", **settings}, owns_pool=False)
        self._depot = _native.Depot.embedded(config.to_core_json(shape.block_bytes))
        layout = json.dumps([[shape.shards, [shape.shard_bytes]]])
        self._namespace = self._depot.open_namespace(json.dumps({"model": "peers"}), layout)
        self._store = self._depot.store(self._namespace, timeout_ms=TASK_MS, copy_json=config.copy_json())
        layer, page, _ = self.blocks.memory.strides
        bases = self.blocks.memory.ctypes.data + layer * np.arange(shape.shards, dtype=np.uint64)
        strides = np.full(shape.shards, page, np.int64)
        self._store.register_pages(bases.astype(np.uint64), strides, shape.blocks)
        self._pages = np.arange(shape.blocks, dtype=np.int64)
        wait_until_resident(before + int(settings["pool_gb"] * GIB))

    def dump(self, hashes: list[bytes]) -> None:
        """Dumps all pages."""
        task = self._store.dump_pages(hashes, self._pages)
        task.wait()
        if failures := task.failures():
            raise RuntimeError(f"blocks were not stored: {failures}")

    def persist(self) -> None:
        """Waits until all blocks are in the tiers."""
        if not self._depot.drain(TASK_MS):
            raise RuntimeError(f"the tiers do not have all blocks after {TASK_MS} ms")

    def load(self, hashes: list[bytes]) -> list[int]:
        """Loads all pages."""
        task = self._store.load_pages(hashes, self._pages)
        task.wait()
        return [int(index) for index in task.failed()]

    def load_one(self, name: bytes, page: int) -> bool:
        """Loads one page."""
        task = self._store.load_pages([name], self._pages[page : page + 1])
        task.wait()
        return len(task.failed()) == 0

    def restore(self, hashes: list[bytes]) -> None:
        """Claims all blocks: a settled claim has them in the pool, verified."""
        claim = self._depot.claim([([self._namespace], 0, 1)], hashes, skip=0, limit=len(hashes))
        _, units, _ = claim.wait(TASK_MS)
        claim.release()
        if units != len(hashes):
            raise RuntimeError(f"{units} of {len(hashes)} blocks were restored")

    def lookup(self, hashes: list[bytes]) -> int:
        """Looks blocks up."""
        return self._store.lookup_on_prefix(hashes)

    def facts(self) -> dict[str, Any]:
        """Returns the version."""
        return {"version": _native.__version__}


def wait_until_resident(nbytes: int) -> None:
    """Waits until the depot has touched its pool, which it does in the background; no longer than a bound."""
    end_s = time.monotonic() + POPULATED_S
    while resident_bytes() < nbytes and time.monotonic() < end_s:
        time.sleep(POLL_S)


def resident_bytes() -> int:
    """Returns the memory of this process that is present, the pool's pages included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    serve(KVDepotSide())
