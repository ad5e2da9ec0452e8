"""The engines' interfaces without an engine: if one is not installed, its base classes are stand-ins."""

import importlib.util
import sys
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar


@dataclass
class StatsBase:
    data: dict[str, Any] = field(default_factory=dict)


class Factory:
    """The part of vLLM's factory that registers names."""

    known: ClassVar[dict[str, tuple[str, str]]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls.known:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls.known[name] = (module_path, class_name)


@dataclass
class BlockStored:
    """Part of vLLM's event of the same name."""

    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    __struct_fields__: ClassVar[tuple[str, ...]] = (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("group_idx", "locality", "ownership"),
    )


@dataclass
class BlockRemoved:
    """As of a vLLM that knows no locality and no ownership yet."""

    block_hashes: list[Any]
    medium: str | None
    group_idx: int | None = None
    __struct_fields__: ClassVar[tuple[str, ...]] = ("block_hashes", "medium", "group_idx")


def maybe_convert_block_hash(block_hash: bytes) -> int:
    """As vLLM does by default."""
    return int.from_bytes(block_hash, "big") & ((1 << 64) - 1)


def _stand_in(name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    module.__path__ = []  # type: ignore[attr-defined]
    sys.modules[name] = module


if importlib.util.find_spec("vllm") is None:
    _stand_in("vllm", __version__="0.0.0")
    for package in ("vllm.distributed", "vllm.distributed.kv_transfer"):
        _stand_in(package)
    _stand_in("vllm.distributed.kv_transfer.kv_connector")
    _stand_in("vllm.distributed.kv_transfer.kv_connector.v1")
    empty = {name: type(name, (), {}) for name in ("KVConnectorBase_V1", "KVConnectorRole", "SupportsHMA")}
    for hook in ("build_connector_worker_meta", "handle_preemptions"):
        setattr(empty["KVConnectorBase_V1"], hook, None)
    messages = ("KVConnectorMetadata", "KVConnectorWorkerMetadata")
    _stand_in(
        "vllm.distributed.kv_transfer.kv_connector.v1.base", **empty, **{name: type(name, (), {}) for name in messages}
    )
    _stand_in(
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
        KVConnectorStats=StatsBase,
        KVConnectorPromMetrics=type("KVConnectorPromMetrics", (), {}),
    )
    _stand_in("vllm.distributed.kv_transfer.kv_connector.factory", KVConnectorFactory=Factory)
    _stand_in("vllm.distributed.kv_events", BlockStored=BlockStored, BlockRemoved=BlockRemoved)
    for package in ("vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        _stand_in(package)
    _stand_in(
        "vllm.v1.core.kv_cache_utils",
        BlockHash=bytes,
        maybe_convert_block_hash=maybe_convert_block_hash,
        resolve_kv_cache_block_sizes=None,
    )
    step = type("SchedulerOutput", (), {"__dataclass_fields__": {"kv_connector_block_state": None}})
    _stand_in("vllm.v1.core.sched.output", SchedulerOutput=step)
    _stand_in("vllm.v1.kv_cache_layout", KVCacheLayout=type("KVCacheLayout", (), {}))
    cpu = SimpleNamespace(is_cpu=lambda: True)
    _stand_in("vllm.platforms", current_platform=cpu)


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class HiCacheStorage:
    """The part of SGLang's base class that a backend uses."""

    def register_mem_pool_host(self, pool: Any) -> None:
        self.mem_pool_host = pool

    def register_mem_host_pool_v2(self, pool: Any, name: Any) -> None:
        self.__dict__.setdefault("registered_pools", {})[name] = pool


class Event:
    """A device's event that has happened."""

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class UnifiedCacheLinker:
    """The part of SGLang's base class of linkers that is used."""

    events: tuple[Any, ...] = ()

    def record_offload_ready(self) -> list[Any]:
        return [Event(), *self.events]


class LayerWiseLoadCounter:
    """Says for each batch which layers are in place, and what became of it."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.batches: list[list[Future[None]]] = []

    def update_producer(self) -> int:
        self.batches.append([Future() for _ in range(self.layers)])
        return len(self.batches) - 1

    def complete(self, batch: int, layer: int) -> None:
        self.batches[batch][layer].set_result(None)

    def fail(self, batch: int, error: BaseException) -> None:
        for layer in self.batches[batch]:
            if not layer.done():
                layer.set_exception(error)

    def finish(self, batch: int) -> bool:
        return not any(layer.exception(timeout=60) for layer in self.batches[batch])

    def reset(self) -> None:
        self.batches.clear()


if importlib.util.find_spec("sglang") is None:
    for package in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.unified_cache"):
        _stand_in(package)
    _stand_in(
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker",
        LayerWiseLoadCounter=LayerWiseLoadCounter,
        UnifiedCacheLinker=UnifiedCacheLinker,
    )
    _stand_in("sglang.srt.utils", get_device_module=lambda: SimpleNamespace(Event=Event))
    _stand_in(
        "sglang.srt.mem_cache.hicache_storage", HiCacheStorage=HiCacheStorage, PoolTransferResult=PoolTransferResult
    )
    sys.modules["sglang.srt.mem_cache"].hicache_storage = sys.modules["sglang.srt.mem_cache.hicache_storage"]  # type: ignore[attr-defined]


class StoragePluginInterface:
    """The part of LMCache's base class of storage plug-ins that is used."""

    def __init__(self, dst_device: str, config: Any, metadata: Any, local_cpu_backend: Any, loop: Any) -> None:
        self.config, self.metadata, self.local_cpu_backend = config, metadata, local_cpu_backend


if importlib.util.find_spec("lmcache") is None:
    for package in ("lmcache", "lmcache.v1", "lmcache.v1.storage_backend"):
        _stand_in(package)
    forms = SimpleNamespace(**{name: SimpleNamespace(name=name) for name in ("KV_2LTD", "KV_MLA_FMT")})
    _stand_in("lmcache.v1.memory_management", MemoryFormat=forms)
    _stand_in("lmcache.v1.storage_backend.abstract_backend", StoragePluginInterface=StoragePluginInterface)
