"""Where the bytes of SGLang's device pools lie: a page is a block whose shards are the layers of the pool.

So a load can say of each layer when it is in place, and no layer waits for those behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdepot.engines.sglang.pages import BLOCK_BYTES_MAX, PIECES_MAX
from kvdepot.errors import ConfigError
from kvdepot.layout import BlockLayout

FORM = "shard_by_layer"
"""Order of the bytes in a page: layer by layer, each with its tensors in SGLang's order."""


@dataclass(frozen=True)
class Piece:
    """The part of every page that one tensor of a layer holds.

    Attributes:
        base: address of page 0's part.
        stride: bytes from a page to the next.
        size_bytes: bytes of the part.
    """

    base: int
    stride: int
    size_bytes: int


@dataclass(frozen=True)
class DevicePages:
    """The pages of one device pool.

    Attributes:
        pool: SGLang's pool, which is kept alive as long as its pages are in use.
        page_tokens: number of the pool's indices per page.
        shards: pieces of each layer of the pool, in the order of the layers.
        layers: the engine's layer that each shard belongs to, ascending.
        rows_per_page: rows of SGLang's tensors per page.
        count: number of pages.
        cuda_device: number of the CUDA device that holds the pages; ``None`` = host memory.
    """

    pool: Any
    page_tokens: int
    shards: tuple[tuple[Piece, ...], ...]
    layers: tuple[int, ...]
    rows_per_page: int
    count: int
    cuda_device: int | None = None

    @classmethod
    def of(cls, entry: Any, name: str) -> "DevicePages":
        """Returns the pages of a pool.

        Args:
            entry: SGLang's ``DevicePoolEntry``.
            name: name of the pool, for errors.

        Raises:
            ConfigError: a page is not contiguous, does not fit a block, or is in memory that no copy engine reaches.
        """
        spans = set()
        pieces: list[list[Piece]] = []
        for tensors, metas in zip(entry.components, entry.buffer_meta, strict=True):
            pieces.append([])
            for tensor, (base, row_stride, size) in zip(tensors, metas, strict=True):
                row_bytes = tensor.nbytes // tensor.shape[0]
                span = size // row_bytes
                if span > 1 and row_stride != row_bytes:
                    raise ConfigError(
                        f"pool {name}: rows of {row_bytes} bytes are {row_stride} bytes apart, so a page is not "
                        "contiguous: use HiCache instead of the linker"
                    )
                spans.add(span)
                pieces[-1].append(Piece(int(base), row_stride * span, size))
        if len(spans) != 1:
            raise ConfigError(f"pool {name}: its tensors have pages of {sorted(spans)} rows: use HiCache instead")
        layers = tuple(sorted(entry.layer_mapping))
        shards = tuple(
            tuple(component[index] for component in pieces for index in _indexes(entry.layer_mapping[layer]))
            for layer in layers
        )
        total = sum(piece.size_bytes for shard in shards for piece in shard)
        if sum(map(len, shards)) != sum(map(len, pieces)):
            raise ConfigError(f"pool {name}: some of its tensors belong to no layer: use HiCache instead")
        if not 0 < total <= BLOCK_BYTES_MAX or sum(map(len, shards)) > PIECES_MAX:
            raise ConfigError(
                f"pool {name}: a page has {sum(map(len, shards))} pieces of {total} bytes together: there must be 1 to "
                f"{PIECES_MAX}, all 1 GiB at most: choose a smaller --page-size"
            )
        (span,) = spans
        rows = min(tensor.shape[0] for tensor in entry.kv_buffer)
        devices = {_cuda_device(tensor, name) for tensor in entry.kv_buffer}
        if len(devices) != 1:
            raise ConfigError(f"pool {name}: its tensors are on several devices: {sorted(map(str, devices))}")
        (device,) = devices
        return cls(entry.device_pool, entry.page_size, shards, layers, span, rows // span, device)

    @property
    def form(self) -> str:
        """Order of the bytes in a page."""
        return FORM

    @property
    def size_bytes(self) -> int:
        """Bytes of a page."""
        return sum(piece.size_bytes for shard in self.shards for piece in shard)

    @property
    def layout(self) -> BlockLayout:
        """Layout of a block: one shard for each layer, with a tensor for each piece."""
        return BlockLayout.of_shards([piece.size_bytes for piece in shard] for shard in self.shards)

    def attach(self, store: Any) -> None:
        """Registers the pages at a new store."""
        pieces = [piece for shard in self.shards for piece in shard]
        bases = np.array([piece.base for piece in pieces], dtype=np.uint64)
        strides = np.array([piece.stride for piece in pieces], dtype=np.int64)
        store.register_pages(bases, strides, self.count, self.pool)

    def places(self, rows: Sequence[int]) -> npt.NDArray[np.int64]:
        """Returns the numbers of the pages that begin at these rows of SGLang's tensors.

        Raises:
            ValueError: a row is not the first of a page.
        """
        found = np.asarray(rows, dtype=np.int64)
        if len(found) and (found % self.rows_per_page).any():
            raise ValueError(f"rows {found.tolist()} are not all multiples of {self.rows_per_page}")
        return found // self.rows_per_page

    def shard_of(self, layer: int) -> int | None:
        """Returns the shard of an engine's layer; ``None`` if the pool has nothing of it."""
        return self.layers.index(layer) if layer in self.layers else None

    def submit(self, store: Any, verb: str, hashes: Sequence[bytes], places: npt.NDArray[Any]) -> Any:
        """Begins a dump or load of pages. Returns the task."""
        return getattr(store, f"{verb}_pages")(hashes, places)


def _indexes(mapped: int | Sequence[int]) -> Sequence[int]:
    return [mapped] if isinstance(mapped, int) else mapped


def _cuda_device(tensor: Any, name: str) -> int | None:
    if tensor.device.type == "cpu":
        return None
    if tensor.device.type != "cuda":
        raise ConfigError(f"pool {name}: no copy engine reaches memory of {tensor.device}")
    return int(tensor.device.index or 0)
