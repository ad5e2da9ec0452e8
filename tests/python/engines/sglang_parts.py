"""SGLang's host pools and configuration, as a storage backend sees them, with numpy in place of torch."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

LAYERS, HEADS, HEAD_DIM, PAGE = 3, 2, 8, 4


class _Pool:
    """A pool with a number of tensors per layer."""

    tensors = 2

    def __init__(self, layout: str = "page_first", pages: int = 16, page_size: int = PAGE, dtype: str = "bfloat16"):
        self.layout, self.page_size, self.dtype = layout, page_size, dtype
        self.layer_num, self.head_num, self.head_dim = LAYERS, HEADS, HEAD_DIM
        self.start_layer, self.end_layer = 0, LAYERS
        self.size = pages * page_size
        self.token_bytes = HEADS * HEAD_DIM * 2
        self.buffer = np.zeros(self.tensors * LAYERS * self.size * self.token_bytes, dtype=np.uint8)

    def get_page_buffer_meta(self, indices: Any) -> Any:
        assert len(indices) % self.page_size == 0
        base, tensor = self.buffer.ctypes.data, LAYERS * self.size * self.token_bytes
        firsts = [int(index) for index in indices[:: self.page_size]]
        if self.layout == "layer_first":
            layer = self.size * self.token_bytes
            found = [
                base + kind * tensor + number * layer + first * self.token_bytes
                for first in firsts
                for number in range(LAYERS)
                for kind in range(self.tensors)
            ]
            return found, [self.page_size * self.token_bytes] * len(found)
        found = [
            base + kind * tensor + first * LAYERS * self.token_bytes for first in firsts for kind in range(self.tensors)
        ]
        return found, [LAYERS * self.page_size * self.token_bytes] * len(found)

    def page(self, number: int) -> np.ndarray:
        """Returns a copy of a page's bytes in the order of ``page_first_direct``: all keys by layer, then all
        values."""
        kinds = self.buffer.reshape(self.tensors, -1)
        if self.layout == "layer_first":
            layers = kinds.reshape(self.tensors, LAYERS, self.size, self.token_bytes)
            first = number * self.page_size
            return layers[:, :, first : first + self.page_size].reshape(-1).copy()
        page_bytes = LAYERS * self.page_size * self.token_bytes
        return kinds[:, number * page_bytes : (number + 1) * page_bytes].reshape(-1).copy()

    def fill(self, seed: int = 0) -> None:
        self.buffer[:] = np.random.default_rng(seed).integers(0, 256, self.buffer.size, dtype=np.uint8)

    def indices(self, *pages: int) -> np.ndarray:
        return np.concatenate([np.arange(page * self.page_size, (page + 1) * self.page_size) for page in pages])


class MHATokenToKVPoolHost(_Pool):
    """Keys and values of every layer; the name is the one that implies SGLang's byte order."""


class MLATokenToKVPoolHost(_Pool):
    """Latent attention: one tensor per layer."""

    tensors = 1


class IndexerPoolHost(_Pool):
    """A pool beside the KV, of an unknown class."""

    tensors = 1


class LogicalPool:
    """Indices without bytes."""

    page_size = PAGE
    layout = "page_first"

    def get_page_buffer_meta(self, indices: Any) -> None:
        return None


class UntoldPool:
    """A pool that reports no addresses."""

    page_size = 1
    layout = "layer_first"

    def get_page_buffer_meta(self, indices: Any) -> Any:
        raise ValueError("zero-copy requires page_first")


class Tensor:
    """The part of torch's tensor that is used."""

    def __init__(self, size: int) -> None:
        self.data = np.zeros(size, dtype=np.uint8)

    def numel(self) -> int:
        return self.data.size

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return int(self.data.ctypes.data)


@dataclass
class Transfer:
    """SGLang's ``PoolTransfer``."""

    name: str
    keys: list[str] | None = None
    host_indices: Any = None
    hit_policy: str = "all_pages"
    device_indices: Any = None


class DeviceTensor(np.ndarray):
    """An array with the attributes of a torch tensor that are used."""

    device = SimpleNamespace(type="cpu", index=None)


def device_tensor(rows: int, row_bytes: int) -> DeviceTensor:
    return np.zeros((rows, row_bytes), dtype=np.uint8).view(DeviceTensor)


class DeviceEntry:
    """SGLang's ``DevicePoolEntry``: tensors of one pool, and the layer that each belongs to."""

    def __init__(
        self, name: str, tensors: list[DeviceTensor], layers: dict[int, Any], page: int = PAGE, span: int | None = None
    ) -> None:
        self.name, self.page_size, self.layer_mapping = name, page, layers
        self.device_pool = type("MHATokenToKVPool", (), {"dtype": "bfloat16", "layer_num": len(layers)})()
        self.components, self.kv_buffer = [tensors], tensors
        self.span = page if span is None else span
        self.buffer_meta = [
            [(tensor.ctypes.data, tensor.strides[0], tensor.shape[1] * self.span) for tensor in tensors]
        ]

    def prepare_locations(self, indices: Any) -> list[int]:
        return [int(first) * self.span // self.page_size for first in indices[:: self.page_size]]

    def fill(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        for tensor in self.kv_buffer:
            tensor[:] = random.integers(0, 256, tensor.shape, dtype=np.uint8)

    def page(self, number: int) -> bytes:
        """Returns a page's bytes, tensor by tensor."""
        return b"".join(tensor[number * self.span : (number + 1) * self.span].tobytes() for tensor in self.kv_buffer)


def heads(name: str = "kv", pages: int = 16, first_layer: int = 0, token_bytes: int = 64) -> DeviceEntry:
    """A pool with keys and values of ``LAYERS`` layers."""
    tensors = [device_tensor(pages * PAGE, token_bytes) for _ in range(2 * LAYERS)]
    return DeviceEntry(name, tensors, {first_layer + layer: (layer, LAYERS + layer) for layer in range(LAYERS)})


class DeviceGroup:
    """SGLang's ``DevicePoolGroup``, in which every pool has the indices of its own transfer."""

    def __init__(self, *entries: DeviceEntry, rank_replicated: bool = False) -> None:
        self.entry_map = {entry.name: entry for entry in entries}
        self.num_layers = 1 + max(layer for entry in entries for layer in entry.layer_mapping)
        self.rank_replicated = rank_replicated

    def resolve_transfers(
        self, transfers: list[Transfer], *, allow_partial: bool = False, allow_missing_kv: bool = False
    ) -> list[Transfer]:
        named = {transfer.name: transfer for transfer in transfers if transfer.keys}
        if not named or (not allow_partial and named.keys() != self.entry_map.keys()):
            return []
        return [replace(one, host_indices=one.device_indices) for one in named.values()]


@dataclass
class Storage:
    """SGLang's ``HiCacheStorageConfig``."""

    extra_config: dict[str, Any]
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    model_name: str | None = "model"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0


@dataclass
class Model:
    """A model's directory, and SGLang's arguments for it."""

    directory: Path
    seed: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "config.json").write_text('{"model_type": "llama"}')
        weights = np.random.default_rng(self.seed).integers(0, 256, 4096, dtype=np.uint8)
        (self.directory / "pytorch_model.bin").write_bytes(weights.tobytes())
        return SimpleNamespace(
            **{"model_path": str(self.directory), "dtype": "auto", "kv_cache_dtype": "auto", **self.arguments}
        )


def names(count: int, chain: str = "a") -> list[str]:
    """Keys of pages, as SGLang makes them: 64 hex digits."""
    return [f"{chain}{number:x}".rjust(64, "0") for number in range(count)]
