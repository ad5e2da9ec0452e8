"""Blocks cut into slices of their KV heads, which engines with different tensor-parallel sizes share.

A rank of a small engine holds several slices, one of a large engine a single one. A slice's bytes do not depend on
that: its heads, tokens and layers are in the order of the engine's layout. Only the number of memory runs differs
between ranks.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdepot.engines.vllm.groups import layer_specs
from kvdepot.engines.vllm.pages import GroupPages, Run, distinct_layers, joined, runs_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True)
class HeadSlices:
    """The slices of a block's KV heads that a rank holds.

    Attributes:
        count: slices of a block, over all ranks.
        slice_heads: KV heads of a slice.
        first: the rank's first slice.
        held: number of consecutive slices that the rank holds.
        replica: index of this rank among those with the same slices.
        replicas: number of ranks with the same slices.
    """

    count: int
    slice_heads: int
    first: int
    held: int
    replica: int = 0
    replicas: int = 1

    @property
    def rank_heads(self) -> int:
        """KV heads of the rank."""
        return self.held * self.slice_heads

    @property
    def all_heads(self) -> int:
        """KV heads of the model."""
        return self.count * self.slice_heads

    def parts(self) -> list[tuple[int, range]]:
        """Returns the number of each of the rank's slices and its heads, as the rank counts them."""
        size = self.slice_heads
        return [(self.first + index, range(index * size, (index + 1) * size)) for index in range(self.held)]


class WholeError(ValueError):
    """Reason why blocks are stored whole for each rank."""


def head_slices(heads: int, wanted: int, ranks: int, rank: int) -> HeadSlices:
    """Returns the slices of one rank. Heads are distributed as in vLLM: in order, replicated if there are too few.

    Args:
        heads: KV heads of the model.
        wanted: slices of a block; more than ``heads`` means one for each head.
        ranks: number of tensor-parallel ranks.
        rank: index of the rank.

    Raises:
        WholeError: a rank boundary would lie inside of a slice.
    """
    count = min(wanted, heads)
    if heads % count:
        raise WholeError(f"{heads} KV heads cannot be cut into {count} equal slices")
    size = heads // count
    if ranks <= heads and not heads % ranks:
        if count % ranks:
            raise WholeError(f"{count} slices cannot be distributed over {ranks} ranks: use a multiple of {ranks}")
        held = count // ranks
        return HeadSlices(count, size, rank * held, held)
    if ranks % heads:
        raise WholeError(f"{heads} KV heads cannot be distributed over {ranks} ranks")
    if count != heads:
        raise WholeError(f"{ranks} ranks hold one of {heads} KV heads each: use {heads} slices or more, not {count}")
    replicas = ranks // heads
    return HeadSlices(count, size, rank // replicas, 1, rank % replicas, replicas)


def slices_of(vllm_config: "VllmConfig", spec: "KVCacheSpec", wanted: int, rank: int) -> HeadSlices:
    """Returns the slices of a group's blocks on a rank.

    Args:
        vllm_config: the engine's configuration.
        spec: the group's cache spec on this rank.
        wanted: slices of a block.
        rank: index of the rank among the tensor-parallel ones.

    Raises:
        WholeError: the blocks cannot be cut like that, or it is not known whether they can.
    """
    from vllm.v1 import kv_cache_interface as kinds

    _check_engine(vllm_config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    heads = int(model.get_total_num_kv_heads())
    found = head_slices(heads, wanted, parallel.tensor_parallel_size, rank)
    if found.replicas > 1 and kv_head_counts(model.hf_text_config.to_dict()) != {heads}:
        # A layer with more heads also has one on each rank, but consecutive ranks do not hold the same one.
        raise WholeError(f"it is not known that every layer has {heads} KV heads, each on {found.replicas} ranks")
    for layer in layer_specs(spec):
        cuttable = (kinds.FullAttentionSpec, kinds.SlidingWindowSpec, kinds.ChunkedLocalAttentionSpec)
        # Not their subclasses, such as latent attention.
        if not isinstance(layer, kinds.AttentionSpec) or type(layer) not in cuttable:
            raise WholeError(f"a cache of kind {type(layer).__name__} has no KV heads to cut it by")
        if getattr(layer.kv_quant_mode, "name", "NONE") != "NONE":
            raise WholeError("scales of quantised KV may differ from rank to rank")
        if not hasattr(layer, "num_head_slots"):
            raise WholeError("this version of vLLM does not report the layout of heads in a page")
        if layer.num_head_slots is not None or layer.tokens_per_state != 1:
            raise WholeError("the attention backend packs the heads of a page in its own way")
        if layer.num_kv_heads != found.rank_heads:
            raise WholeError(f"a layer has {layer.num_kv_heads} KV heads on this rank, not {found.rank_heads}")
    return found


def _check_engine(vllm_config: "VllmConfig") -> None:
    """Rejects an engine whose KV is not known to be independent of the number of ranks.

    Raises:
        WholeError: its blocks are stored by rank.
    """
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        raise WholeError("decode context parallelism distributes tokens, not heads")
    model = vllm_config.model_config
    # For drafts without a model, such as n-grams, this is the engine's own model.
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None and draft is not model:
        raise WholeError("a draft model has its own KV heads")
    if getattr(model, "quantization", None):
        raise WholeError("scales of quantised weights may be made for each rank, so that its KV depends on the ranks")


def kv_head_counts(config: Any) -> set[int]:
    """Returns all numbers of KV heads in a model's configuration, at any depth: layers may have their own."""
    if isinstance(config, (list, tuple)):
        return set().union(*map(kv_head_counts, config))
    if not isinstance(config, dict):
        return set()
    counts: set[int] = set()
    for name, value in config.items():
        words = str(name).lower()
        if "head" in words and ("kv" in words or "key_value" in words) and "dim" not in words:
            counts |= {one for one in (value if isinstance(value, (list, tuple)) else [value]) if type(one) is int}
        else:
            counts |= kv_head_counts(value)
    return counts


def same_on_all_ranks(spec: "KVCacheSpec") -> bool:
    """Returns whether a group's KV is equal on all tensor-parallel ranks, whatever their number: latent attention."""
    return all(getattr(layer, "max_tp_shards", None) == 1 for layer in layer_specs(spec))


def slice_pages(
    layer_names: Sequence[str],
    kv_caches: Mapping[str, "torch.Tensor"],
    page_count: int,
    layerwise: bool,
    rank_heads: int,
    heads: range,
) -> GroupPages:
    """Returns the pages of some KV heads, as ``group_pages`` does for all heads.

    Args:
        layer_names: names of the group's layers.
        kv_caches: tensors [block, head, token, content] by layer; a block may be several kernel blocks.
        page_count: number of blocks.
        layerwise: whether each layer is a shard, or all are one.
        rank_heads: KV heads of the tensors.
        heads: heads of the slice.

    Raises:
        ValueError: as ``group_pages``.
        WholeError: a tensor has other dimensions.
    """
    layers, device = distinct_layers(layer_names, kv_caches, page_count)
    units: list[tuple[int, list[_Unit]]] = []
    forms: list[str] = []
    for number, name in enumerate(layers):
        found, form = _layer_units(name, kv_caches[name], page_count, rank_heads, heads)
        units.append((number, found))
        forms.append(form)
    forms = list(dict.fromkeys(forms))
    if layerwise:
        shards = tuple(joined([run for unit in found for run in unit.runs]) for _, found in units)
    elif units:
        placed = [((number, unit.head), unit) for number, found in units for unit in found]
        in_memory = sorted(placed, key=lambda one: one[1].runs[0].base)
        if in_memory != placed:
            order = repr([place for place, _ in in_memory]).encode()
            forms.append(f"order:{hashlib.sha256(order).hexdigest()[:16]}")
        shards = (joined([run for _, unit in in_memory for run in unit.runs]),)
    else:
        shards = ()
    return GroupPages(tuple(layers), shards, tuple(forms), page_count, device, whole_shards=True)


@dataclass(frozen=True)
class _Unit:
    """Part of a layer's slice that is contiguous in every layout: a head, or all heads if tokens are outside of heads.

    Attributes:
        head: index in the slice; -1 = all.
    """

    head: int
    runs: tuple[Run, ...]


def _layer_units(
    name: str, tensor: "torch.Tensor", page_count: int, rank_heads: int, heads: range
) -> tuple[list[_Unit], str]:
    """Returns a layer's part of a slice, and the form that its bytes have on every rank of every engine."""
    item, shape = tensor.element_size(), tuple(tensor.shape)
    if len(shape) != 4 or shape[1] != rank_heads:
        raise WholeError(f"layer {name}: a tensor of {shape} is not [block, {rank_heads} heads, token, content]")
    block, head, token, content = (step * item for step in tensor.stride())
    ratio = shape[0] // page_count
    sizes = {"k": ratio, "h": len(heads), "n": shape[2], "c": shape[3]}
    steps = {"k": block, "h": head, "n": token, "c": content}
    # Strides differ between ranks, their order does not. A dimension of one has no place in that order.
    order = sorted((letter for letter, size in sizes.items() if size > 1), key=lambda letter: -steps[letter])
    described = "x".join(f"{size}{letter}" for letter, size in sizes.items())
    form = f"{tensor.dtype}:slice:{described}@{''.join(order)}"
    base, page_stride = tensor.data_ptr() + heads.start * head, block * ratio

    def cut(letters: Sequence[str], at: int) -> tuple[Run, ...]:
        return runs_of([(sizes[letter], steps[letter]) for letter in letters], item, at, page_stride)

    if order[:1] != ["h"]:
        return [_Unit(-1, cut(order, base))], form
    return [_Unit(index, cut(order[1:], base + index * head)) for index in range(len(heads))], form
