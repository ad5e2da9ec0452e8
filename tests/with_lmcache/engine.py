"""LMCache's own engine inside a process, with the configuration of its DAX backend, and KV in plain tensors."""

from pathlib import Path
from typing import Any

import torch
import yaml
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase

LAYERS, HEADS, HEAD_SIZE, CHUNK = 4, 4, 16, 256
SEED_004 = """
chunk_size: 256
local_cpu: false
max_local_cpu_size: 16
cache_policy: LRU
min_retrieve_tokens: 0
storage_plugins: ["dax"]
store_location: dax
retrieve_locations: ["dax"]
extra_config:
  storage_plugin.dax.module_path: lmcache.v1.storage_backend.plugins.dax_backend
  storage_plugin.dax.class_name: DaxBackend
  dax.device_path: "/dev/daxxxx"
  dax.max_dax_size: 64
  dax.async_put: false
"""
"""The configuration of the original specification."""
OURS = {
    "storage_plugin.dax.module_path": "kvdepot.engines.lmcache",
    "storage_plugin.dax.class_name": "KVDepotBackend",
}


def configuration(
    file: Path, settings: dict[str, Any], extra: dict[str, Any] | None = None, **changes: Any
) -> LMCacheEngineConfig:
    """The original configuration with our module and class, this machine's sizes, and the place of the blocks.

    ``extra``: other values of keys in ``extra_config``.
    """
    values = yaml.safe_load(SEED_004)
    values["extra_config"] |= OURS | {f"kvdepot.{name}": value for name, value in settings.items()} | (extra or {})
    values |= {"max_local_cpu_size": 0.125, **changes}
    file.write_text(yaml.safe_dump(values))
    return LMCacheEngineConfig.from_file(str(file))


def metadata(**changes: Any) -> LMCacheMetadata:
    fields = {
        "model_name": "model",
        "world_size": 1,
        "local_world_size": 1,
        "worker_id": 0,
        "local_worker_id": 0,
        "kv_dtype": torch.bfloat16,
        "kv_shape": (LAYERS, 2, CHUNK, HEADS, HEAD_SIZE),
        "chunk_size": CHUNK,
        "role": "worker",
    }
    return LMCacheMetadata(**{**fields, **changes})


class TensorConnector(GPUConnectorInterface):
    """Copies between LMCache's objects and one tensor of [keys and values, layers, tokens, hidden]."""

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        kwargs["kv"][:, :, start:end].copy_(memory_obj.tensor)

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        memory_obj.tensor.copy_(kwargs["kv"][:, :, start:end])

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
        for memory, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory, start, end, **kwargs)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for memory, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, LAYERS, num_tokens, HEADS * HEAD_SIZE])


def engine(config: LMCacheEngineConfig, meta: LMCacheMetadata) -> LMCacheEngine:
    """Creates the engine as a worker does."""
    made = LMCacheEngine(
        config, meta, ChunkedTokenDatabase(config, meta), TensorConnector(), lambda *_: None, lambda one, _: one
    )
    made.post_init()
    return made


def kv(seed: int, tokens: int) -> torch.Tensor:
    """Returns KV of ``tokens`` tokens that no other seed has."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2, LAYERS, tokens, HEADS * HEAD_SIZE), generator=generator).to(torch.bfloat16)
