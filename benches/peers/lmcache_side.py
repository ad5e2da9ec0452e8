"""LMCache's DAX storage: the backend below its engine, or the core that its server calls.

The engine's pages and LMCache's objects are both host memory here; as many threads as there are cores copy between
them, in place of a device.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.dax.core import DaxCore
from lmcache.v1.token_database import ChunkedTokenDatabase

from benches.peers.side import Side, serve
from benches.peers.work import GIB

TOKENS, HEAD_SIZE = 256, 64
HEAD_BYTES = 2 * TOKENS * HEAD_SIZE * torch.bfloat16.itemsize
"""Bytes of a chunk of one layer with one head."""


class NoConnector(GPUConnectorInterface):  # type: ignore[misc]
    """An engine needs one to exist; nothing is moved by it."""

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Is not called."""

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Is not called."""

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
        """Is not called."""

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        """Is not called."""

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Is not called."""
        return torch.Size([num_tokens])


class LMCacheSide(Side):
    """Chunks of one layer, as large as the blocks."""

    def open(self, settings: dict[str, Any]) -> None:
        """Opens the engine's storage over ``medium``."""
        heads, rest = divmod(self.blocks.shape.block_bytes, HEAD_BYTES)
        if rest or self.blocks.shape.shards != 1:
            raise ValueError(f"a chunk has one shard of a multiple of {HEAD_BYTES} bytes")
        self._shape = torch.Size([2, 1, TOKENS, heads * HEAD_SIZE])
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            local_cpu=False,
            max_local_cpu_size=settings["memory_bytes"] / GIB,
            storage_plugins=["dax"],
            store_location="dax",
            retrieve_locations=["dax"],
            extra_config={
                "storage_plugin.dax.module_path": "lmcache.v1.storage_backend.plugins.dax_backend",
                "storage_plugin.dax.class_name": "DaxBackend",
                "dax.device_path": settings["medium"],
                "dax.max_dax_size": settings["medium_bytes"] / GIB,
            },
        )
        metadata = LMCacheMetadata(
            model_name="peers",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(1, 2, TOKENS, heads, HEAD_SIZE),
            chunk_size=TOKENS,
            role="worker",
        )
        database = ChunkedTokenDatabase(config, metadata)
        self._engine = LMCacheEngine(config, metadata, database, NoConnector(), lambda *_: None, lambda one, _: one)
        self._engine.post_init()
        manager = self._engine.storage_manager
        self._backend = manager.storage_backends["dax"]
        self._memory = self._backend.get_allocator_backend()
        self._workers = settings["workers"]
        self._pool = ThreadPoolExecutor(self._workers)
        self._core: Any = None
        if settings["core"]:
            self._core = DaxCore(
                device_path=settings["medium"],
                max_dax_size_bytes=settings["medium_bytes"],
                slot_bytes=self.blocks.shape.block_bytes,
            )

    def dump(self, hashes: list[bytes]) -> None:
        """Copies pages into objects and stores those, before its engine goes on (``dax.async_put`` is off)."""
        objects = [self._allocated() for _ in hashes]
        pages = self.blocks.memory[0]
        self._spread(lambda index: np.copyto(view(objects[index]), pages[index]), len(objects))
        keys = [key(one) for one in hashes]
        if self._core is None:
            self._backend.batched_submit_put_task(keys, objects)
        else:
            stored = self._parts(len(keys), lambda part: self._core.put_many(keys[part], objects[part]))
            if not all(stored):
                raise RuntimeError("objects were not stored")
        for one in objects:
            one.ref_count_down()

    def persist(self) -> None:
        """Does nothing: the medium has them."""

    def restore(self, hashes: list[bytes]) -> None:
        """Reads all into objects."""
        for one in self._read(hashes):
            one.ref_count_down()

    def load(self, hashes: list[bytes]) -> list[int]:
        """Reads all into objects, and copies those to the pages."""
        objects = self._read(hashes)
        pages = self.blocks.memory[0]
        self._spread(lambda index: np.copyto(pages[index], view(objects[index])), len(objects))
        for one in objects:
            one.ref_count_down()
        return []

    def _read(self, hashes: list[bytes]) -> list[Any]:
        keys = [key(one) for one in hashes]
        if self._core is None:
            objects = self._backend.batched_get_blocking(keys)
            if any(one is None for one in objects) or len(objects) != len(keys):
                raise RuntimeError("objects were not found")
            return list(objects)
        into = [self._allocated() for _ in keys]
        loaded = self._parts(len(keys), lambda part: self._core.load_many_into(keys[part], into[part]))
        if not all(loaded):
            raise RuntimeError("objects were not found")
        return into

    def _allocated(self) -> Any:
        found = self._memory.allocate(self._shape, torch.bfloat16, MemoryFormat.KV_2LTD)
        if found is None:
            raise RuntimeError("LMCache's memory is full")
        return found

    def _parts(self, count: int, work: Callable[[slice], Sequence[bool]]) -> list[bool]:
        """Does a part on each worker, as its server does with the keys of a task."""
        step = -(-count // self._workers)
        parts = [slice(start, start + step) for start in range(0, count, step)]
        return [one for found in self._pool.map(work, parts) for one in found]

    def _spread(self, work: Callable[[int], None], count: int) -> None:
        list(self._pool.map(work, range(count)))


def key(one: bytes) -> Any:
    """Returns LMCache's key of a block."""
    return CacheEngineKey("peers", 1, 0, int.from_bytes(one[:8], "little"), torch.bfloat16)


def view(one: Any) -> Any:
    """Returns an object's bytes as an array."""
    return np.frombuffer(one.byte_array, np.uint8)


if __name__ == "__main__":
    serve(LMCacheSide())
