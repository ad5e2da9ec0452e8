"""UCM's store of the pipeline ``Cache|Posix``, through its own Python class.

Its package needs a CUDA runtime, for which tools/ucm/cudart.c stands in: the device's memory is the host's, and a
stream is a thread that copies. torch is needed for the types of its signatures only: calls by address use none of it.
"""

import importlib.metadata
import sys
import time
import types
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from benches.peers.side import Side, serve

DISTRIBUTION = "uc-manager-cuda-cu129"
TASK_MS = 120_000
PUBLISHED_S = 120.0
POLL_S = 0.001


def version() -> str:
    """Returns the version of the package, which must be importable."""
    store_class()
    return importlib.metadata.version(DISTRIBUTION)


def store_class() -> Any:
    """Returns the class of its store."""
    if "torch" not in sys.modules:
        standin: Any = types.ModuleType("torch")
        standin.Tensor = type("Tensor", (), {})
        sys.modules["torch"] = standin
    from ucm.store.pipeline.connector import UcmPipelineStore

    return UcmPipelineStore


class UcmSide(Side):
    """A store in the role of a worker, which has a device."""

    def open(self, settings: dict[str, Any]) -> None:
        """Opens it. ``settings`` are keys of UCM's configuration."""
        shape = self.blocks.shape
        self._directory = Path(settings["storage_backends"][0])
        self._digits = settings.get("data_dir_shard_bytes", 3)
        config = {
            "store_pipeline": "Cache|Posix",
            "unique_id": uuid.uuid4().hex,
            "device_id": 0,
            "tensor_size_list": [shape.shard_bytes],
            "shard_size": shape.shard_bytes,
            "block_size": shape.block_bytes,
            "share_buffer_enable": False,
            "timeout_ms": TASK_MS,
            **settings,
        }
        self._store = store_class()(config)
        self._addresses = self.blocks.addresses().reshape(-1, 1)
        self._shards = list(range(shape.shards)) * shape.blocks

    def dump(self, hashes: list[bytes]) -> None:
        """Dumps all shards of all blocks as one task."""
        self._dumped = hashes
        self._store.wait(self._store.dump_data(self._rows(hashes), self._shards, self._addresses))

    def persist(self) -> None:
        """Waits until every block has a file under its final name: UCM has no call for it."""
        end_s = time.monotonic() + PUBLISHED_S
        for name in [one.hex() for one in self._dumped]:
            while not (self._directory / name[: self._digits] / name).exists():
                if time.monotonic() > end_s:
                    raise RuntimeError(f"{name} has no file after {PUBLISHED_S:.0f} s")
                time.sleep(POLL_S)

    def load(self, hashes: list[bytes]) -> list[int]:
        """Loads all shards of all blocks as one task. A task fails as a whole, by an exception."""
        self._store.wait(self._store.load_data(self._rows(hashes), self._shards, self._addresses))
        return []

    def lookup(self, hashes: list[bytes]) -> int:
        """Looks blocks up; it answers the index of the last one."""
        return int(self._store.lookup_on_prefix(hashes)) + 1

    def facts(self) -> dict[str, Any]:
        """Returns the version."""
        return {"version": version(), "numpy": np.__version__}

    def _rows(self, hashes: list[bytes]) -> list[bytes]:
        return [one for one in hashes for _ in range(self.blocks.shape.shards)]


if __name__ == "__main__":
    serve(UcmSide())
