"""Where a block's bytes lie according to vLLM: the self-test verifies the page arithmetic of ``pages`` against it.

vLLM specifies it twice, and ``pages`` reads neither: ``KVCacheConfig.kv_cache_tensors`` has the place of every layer's
block in the allocation, by which vLLM itself zeroes and copies blocks, and the layer's cache spec has the bytes of a
page. The tensors that layers compute on have to agree with both.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


class PlacementError(RuntimeError):
    """A layer's tensor is not where vLLM's configuration of the cache has it."""


def blocks_of(
    layer_names: Sequence[str],
    kv_caches: Mapping[str, "torch.Tensor"],
    kv_cache_config: "KVCacheConfig",
    group_index: int,
) -> list["torch.Tensor"]:
    """Returns each layer's blocks as bytes, by torch's own indexing; writes go through to the engine's memory.

    Raises:
        PlacementError: a tensor's blocks are not where the cache's configuration places them, or have another size.
    """
    places, sizes = _places(kv_cache_config), _page_bytes(kv_cache_config.kv_cache_groups[group_index])
    origins: dict[int, str] = {}
    found = []
    for name in layer_names:
        blocks = _by_block(name, kv_caches[name], kv_cache_config.num_blocks)
        page_bytes = sizes.get(name, blocks[0].numel())
        if blocks[0].numel() != page_bytes:
            raise PlacementError(
                f"layer {name}: blocks of {blocks[0].numel()} bytes, and vLLM's cache spec has {page_bytes}"
            )
        if name in places:
            first, stride = places[name]
            if (apart := blocks.stride(0)) != stride:
                raise PlacementError(
                    f"layer {name}: blocks are {apart} bytes apart, and vLLM's configuration has {stride}"
                )
            origins.setdefault(blocks.data_ptr() - first, name)
        found.append(blocks)
    if len(origins) > 1:
        names = " and ".join(list(origins.values())[:2])
        raise PlacementError(f"layers {names} are not as far apart as vLLM's cache configuration has them")
    return found


def head_bytes(layers: Sequence["torch.Tensor"], page: int, heads: range, by_layer: bool) -> list["torch.Tensor"]:
    """Returns the bytes of some KV heads in a page, shard by shard, by torch's own indexing.

    Args:
        layers: blocks of each layer, from ``blocks_of``.
        page: index of the block.
        heads: KV heads of the slice.
        by_layer: whether each layer is a shard, or all are one.
    """
    import torch

    shards = []
    for layer in layers:
        kept = layer[page].narrow(-3, heads.start, len(heads))
        order = sorted(range(kept.dim()), key=lambda dim: (kept.shape[dim] == 1, -kept.stride(dim)))
        heads_outside = len(heads) > 1 and order[0] == kept.dim() - 3
        in_order = kept.permute(order)
        shards.append(list(in_order) if heads_outside else [in_order])
    if not by_layer:
        shards = [sorted((unit for units in shards for unit in units), key=lambda unit: unit.data_ptr())]
    return [torch.cat([unit.reshape(-1) for unit in units]) for units in shards]


def _by_block(name: str, tensor: "torch.Tensor", num_blocks: int) -> "torch.Tensor":
    """Returns the tensor as bytes, manager's blocks first: kernels may see each as several consecutive blocks."""
    import torch

    if tensor.shape[0] % num_blocks:
        raise PlacementError(f"layer {name}: a tensor of {tuple(tensor.shape)} does not have {num_blocks} blocks")
    blocks = tensor if tensor.shape[0] == num_blocks else tensor.unflatten(0, (num_blocks, -1))
    as_bytes: torch.Tensor = (blocks if blocks.stride(-1) == 1 else blocks.unsqueeze(-1)).view(torch.uint8)
    return as_bytes


def _places(kv_cache_config: "KVCacheConfig") -> dict[str, tuple[int, int]]:
    """Returns for each layer where its block 0 begins in the allocation, and the distance to the next block, in bytes.

    Layers that share another layer's cache are absent.
    """
    return {
        name: (tensor.offset + index * tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for index, name in enumerate(tensor.layers)
    }


def _page_bytes(group: "KVCacheGroupSpec") -> dict[str, int]:
    """Returns for each layer the bytes of a block without padding, where the spec has them."""
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None) or dict.fromkeys(
        group.layer_names, group.kv_cache_spec
    )
    sizes = {name: getattr(spec, "unpadded_page_size_bytes", None) for name, spec in by_layer.items()}
    return {name: int(size) for name, size in sizes.items() if size is not None}
