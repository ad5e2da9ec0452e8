"""Where the bytes of a block lie in the engine's tensors, as opaque runs, whatever the layout means to attention.

The first dimension of a layer's tensor counts blocks, as in every version of vLLM since 0.29; the others make up the
block's page. A page is cut into runs that are contiguous in memory, in the order of their addresses. So a contiguous
page is one run, whatever the order of its dimensions. Shape and strides determine that order, and both are facts of the
namespace.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvdepot.layout import BlockLayout

if TYPE_CHECKING:
    import torch

RUNS_PER_PAGE_MAX = 4096


@dataclass(frozen=True)
class Run:
    """A run of ``size`` bytes in every page: in page ``p`` it begins at ``base + p * stride``."""

    base: int
    stride: int
    size: int


@dataclass(frozen=True)
class LayerPages:
    """One layer's pages, and the properties of the tensor that determine the order of their bytes."""

    runs: tuple[Run, ...]
    form: str


@dataclass(frozen=True)
class GroupPages:
    """A group's pages, cut into shards that move as one.

    Attributes:
        cuda_device: number of the device that holds them; ``None`` = host memory.
        whole_shards: whether the namespace's layout lists whole shards, not their runs. Then engines whose pages are in
            other runs share the namespace, if a shard's bytes are the same.
    """

    layer_names: tuple[str, ...]
    shards: tuple[tuple[Run, ...], ...]
    forms: tuple[str, ...]
    page_count: int
    cuda_device: int | None = None
    whole_shards: bool = False

    @property
    def layout(self) -> BlockLayout:
        """The namespace's layout: for each shard its tensors' sizes."""
        sizes = ([run.size for run in shard] for shard in self.shards)
        return BlockLayout.of_shards([sum(one)] if self.whole_shards else one for one in sizes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over the group's layers."""
        return sum(run.size for shard in self.shards for run in shard)

    def bases(self) -> npt.NDArray[np.uint64]:
        """Returns the address of page 0 for each run."""
        return np.array([run.base for shard in self.shards for run in shard], dtype=np.uint64)

    def strides(self) -> npt.NDArray[np.int64]:
        """Returns the bytes from one page to the next for each run."""
        return np.array([run.stride for shard in self.shards for run in shard], dtype=np.int64)

    def sizes(self) -> npt.NDArray[np.uint64] | None:
        """Returns the bytes of each run if the runs are not the layout's tensors, else ``None``."""
        if not self.whole_shards:
            return None
        return np.array([run.size for shard in self.shards for run in shard], dtype=np.uint64)

    def shard_of_layer(self) -> dict[str, int]:
        """Returns the shard of each layer; shard 0 for all of them if the layout is not layer-wise."""
        by_layer = len(self.shards) == len(self.layer_names)
        return {name: index if by_layer else 0 for index, name in enumerate(self.layer_names)}


def group_pages(
    layer_names: Sequence[str], kv_caches: Mapping[str, "torch.Tensor"], page_count: int, layerwise: bool
) -> GroupPages:
    """Returns the pages of a group's layers, with one shard per layer, or one for all if not ``layerwise``.

    Layers that are only another name for the same memory (shared KV) count once.

    Raises:
        ValueError: a layer has no tensor, so that blocks would lack its bytes; or its pages cannot be copied.
    """
    by_name, device = distinct_layers(layer_names, kv_caches, page_count)
    names, layers = tuple(by_name), list(by_name.values())
    forms = tuple(dict.fromkeys(layer.form for layer in layers))
    if layerwise:
        shards = tuple(layer.runs for layer in layers)
    elif layers:
        block, order = by_address([run for layer in layers for run in layer.runs])
        shards, forms = (joined(block),), forms + order
    else:
        shards = ()
    return GroupPages(names, shards, forms, page_count, device)


def distinct_layers(
    layer_names: Sequence[str], kv_caches: Mapping[str, "torch.Tensor"], page_count: int
) -> tuple[dict[str, LayerPages], int | None]:
    """Returns the layers with memory of their own, and the number of the device that holds it; ``None`` = host memory.

    Raises:
        ValueError: as ``group_pages``.
    """
    layers: dict[str, LayerPages] = {}
    devices: set[int | None] = set()
    seen: set[tuple[Run, ...]] = set()
    for name in layer_names:
        if name not in kv_caches:
            raise ValueError(f"vLLM has registered no tensor for layer {name} of this group")
        pages = layer_pages(kv_caches[name], page_count)
        devices.add(cuda_device(kv_caches[name]))
        if pages.runs not in seen:
            seen.add(pages.runs)
            layers[name] = pages
    if len(devices) > 1:
        raise ValueError(f"the layers of one group are in memories of different devices: {devices}")
    return layers, next(iter(devices), None)


def cuda_device(tensor: "torch.Tensor") -> int | None:
    """Returns the number of the CUDA device that holds a tensor; ``None`` for host memory.

    Raises:
        ValueError: no copy engine reaches the tensor's memory.
    """
    if tensor.device.type == "cpu":
        return None
    if tensor.device.type != "cuda":
        raise ValueError(f"no copy engine reaches memory of {tensor.device}")
    return int(tensor.device.index or 0)


def layer_pages(tensor: "torch.Tensor", page_count: int) -> LayerPages:
    """Cuts one layer's tensor into runs.

    Raises:
        ValueError: the tensor's first dimension does not count blocks, or its pages are in too many pieces.
    """
    item = tensor.element_size()
    shape, strides = list(tensor.shape), [step * item for step in tensor.stride()]
    if not shape or shape[0] < page_count or shape[0] % page_count:
        raise ValueError(f"the first dimension of {tuple(shape)} does not count {page_count} blocks")
    # The kernel may see every block as `ratio` smaller kernel blocks, a constant stride apart.
    ratio = shape[0] // page_count
    page_stride = strides[0] * ratio
    dims = [(ratio, strides[0]), *zip(shape[1:], strides[1:], strict=True)]
    dims = [(n, step) for n, step in dims if n != 1]
    form = f"{tensor.dtype}:{shape[1:]}/{[step for _, step in dims]}x{ratio}"
    # From the widest stride to the narrowest: dimensions that are adjacent in memory are one run.
    widest_first = sorted(dims, key=lambda dim: -dim[1])
    if widest_first != dims:
        # An earlier version used the logical order: its blocks have other bytes.
        form += "@address"
    return LayerPages(runs_of(widest_first, item, tensor.data_ptr(), page_stride), form)


def runs_of(dims: Sequence[tuple[int, int]], item: int, base: int, page_stride: int) -> tuple[Run, ...]:
    """Returns the runs of an array with these dimensions (size and stride in bytes), outermost first.

    Args:
        dims: dimensions without those of size 1.
        item: bytes of an element.
        base: address of the first element in page 0.
        page_stride: bytes from one page to the next.

    Raises:
        ValueError: the array is in too many pieces.
    """
    outer, run_size = list(dims), item
    while outer and outer[-1][1] == run_size:
        run_size *= outer.pop()[0]
    pieces = math.prod(n for n, _ in outer)
    if pieces > RUNS_PER_PAGE_MAX:
        raise ValueError(f"a page with the dimensions (size, bytes apart) {list(dims)} is in {pieces} pieces")
    offsets = [0]
    for n, step in outer:
        offsets = [offset + i * step for offset in offsets for i in range(n)]
    return tuple(Run(base + offset, page_stride, run_size) for offset in offsets)


def by_address(runs: Sequence[Run]) -> tuple[list[Run], tuple[str, ...]]:
    """Returns a block's runs in the order of their addresses, and a name for that order if the runs were not in it.

    Layouts that keep a block together may hold its layers, or the heads of different layers, in another order than the
    group lists them.
    """
    order = sorted(range(len(runs)), key=lambda index: runs[index].base)
    if order == list(range(len(runs))):
        return list(runs), ()
    return [runs[index] for index in order], (f"order:{hashlib.sha256(repr(order).encode()).hexdigest()[:16]}",)


def joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Joins runs that are adjacent in memory: with a block-outermost layout a whole block is one copy."""
    found: list[Run] = []
    for run in runs:
        last = found[-1] if found else None
        if last is not None and last.base + last.size == run.base and last.stride == run.stride:
            found[-1] = Run(last.base, last.stride, last.size + run.size)
        else:
            found.append(run)
    return tuple(found)
