"""KV-cache groups as the depot needs them: block size in hash units, window, and whether they can be stored at all."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class Group:
    """One group of layers that share a block table.

    Attributes:
        index: position in ``KVCacheConfig.kv_cache_groups``.
        block_tokens: tokens of one block over all context-parallel ranks.
        hashes_per_block: hash units a block covers; the block's key is the last of them.
        window_blocks: last blocks of a hit that the group's attention reads; 0 = all.
    """

    index: int
    layer_names: tuple[str, ...]
    spec: Any
    block_tokens: int
    hashes_per_block: int
    window_blocks: int


@dataclass(frozen=True)
class Geometry:
    """All groups of an engine.

    Attributes:
        hash_tokens: tokens of one entry of ``Request.block_hashes``.
        hit_tokens: a hit ends at a multiple of this.
        unsupported: empty, or why this model's cache cannot be stored by block.
    """

    groups: tuple[Group, ...]
    hash_tokens: int
    hit_tokens: int
    unsupported: str = ""

    @property
    def windowed(self) -> bool:
        """Whether some group reads only the last blocks of a hit."""
        return any(group.window_blocks for group in self.groups)


def geometry(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> Geometry:
    """Reads the groups of a cache configuration, of a worker or of the scheduler."""
    all_groups = kv_cache_config.kv_cache_groups
    if not all_groups:
        return Geometry((), 1, 1, "the model has no KV cache")
    if problem := too_old(len(all_groups)) or computes_all_tokens(vllm_config.model_config):
        return Geometry((), 1, 1, problem)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    # A hash-addressed store holds the prefix-cacheable groups only: vLLM rebuilds the others by itself.
    indexes = getattr(kv_cache_config, "prefix_cacheable_group_ids", range(len(all_groups)))
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    if getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1) > 1:
        return Geometry((), 1, 1, "prefill context parallelism is not supported")
    spans = {
        index: all_groups[index].kv_cache_spec.block_size
        * (dcp if getattr(all_groups[index].kv_cache_spec, "dcp_sharded", True) else 1)
        for index in indexes
    }
    hit_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    groups = []
    for index in indexes:
        spec = all_groups[index].kv_cache_spec
        window, problem = _window_tokens(spec)
        if spans[index] % hash_tokens:
            problem = f"blocks of {spans[index]} tokens are not whole numbers of hashes of {hash_tokens} tokens"
        if problem:
            return Geometry((), hash_tokens, hash_tokens, problem)
        groups.append(
            Group(
                index=index,
                layer_names=tuple(all_groups[index].layer_names),
                spec=spec,
                block_tokens=spans[index],
                hashes_per_block=spans[index] // hash_tokens,
                window_blocks=0 if window is None else max(1, math.ceil(window / spans[index])),
            )
        )
    return Geometry(tuple(groups), hash_tokens, hit_tokens)


def computes_all_tokens(model_config: Any) -> str:
    """Empty, or why every token of a prompt has to go through the model, whatever is stored of it."""
    if getattr(model_config, "pooler_config", None) is None or model_config.is_prefix_caching_supported:
        return ""
    return "this model pools over all tokens of a prompt, and vLLM ends when a part of them comes from a cache"


def too_old(group_count: int) -> str:
    """Empty, or what this version of vLLM lacks."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.output import SchedulerOutput

    if "kv_connector_block_state" not in getattr(SchedulerOutput, "__dataclass_fields__", {}):
        return "this version of vLLM does not tell a connector which blocks a request has: use 0.29 or later"
    if group_count > 1 and not hasattr(KVConnectorBase_V1, "get_transfer_results"):
        return "this version of vLLM ends with the first failed load of a hybrid model: use 0.30 or later"
    return ""


def _window_tokens(spec: Any) -> tuple[int | None, str]:
    """Tokens before a hit's end that the group still reads (None = all), or what is wrong.

    Decided by class names over the class's ancestors, so that a class that a version lacks needs no import.
    """
    inner = getattr(spec, "kv_cache_specs", None)
    if inner is not None:
        found = {_window_tokens(layer_spec) for layer_spec in inner.values()}
        return found.pop() if len(found) == 1 else (None, "layers with different windows share one block table")
    names = [cls.__name__ for cls in type(spec).__mro__]
    if "RSWASpec" in names:
        return None, "blocks of RSWASpec are recycled while a request runs"
    if "SlidingWindowSpec" in names:
        # The window of the next token: it sees itself and this many tokens before it.
        return spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0), ""
    if "ChunkedLocalAttentionSpec" in names:
        return spec.attention_chunk_size, ""
    if "FullAttentionSpec" in names:
        return None, ""
    return None, f"cache of kind {type(spec).__name__} is not stored by block"
