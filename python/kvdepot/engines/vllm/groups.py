"""KV-cache groups as the depot needs them: block size in hash units, window, and whether they can be stored."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.engines.vllm.releases.refusal import problem_of_groups, problem_of_states

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec


@dataclass(frozen=True)
class Group:
    """One group of layers that share a block table.

    Attributes:
        index: position in ``KVCacheConfig.kv_cache_groups``.
        block_tokens: tokens of one block over all context-parallel ranks.
        hashes_per_block: hash units that a block covers; the last one is the block's key.
        window_blocks: last blocks of a hit that the group's attention reads; 0 = all.
        keeps_state: whether a block is the state after its last token (Mamba), which later tokens overwrite elsewhere.
    """

    index: int
    layer_names: tuple[str, ...]
    spec: "KVCacheSpec"
    block_tokens: int
    hashes_per_block: int
    window_blocks: int
    keeps_state: bool = False


@dataclass(frozen=True)
class Geometry:
    """All groups of an engine.

    Attributes:
        hash_tokens: tokens of one entry of ``Request.block_hashes``.
        hit_tokens: a hit ends at a multiple of this.
        unsupported: why this model's cache cannot be stored by block; empty if it can.
    """

    groups: tuple[Group, ...]
    hash_tokens: int
    hit_tokens: int
    unsupported: str = ""

    @property
    def windowed(self) -> bool:
        """Whether some group reads only the last blocks of a hit."""
        return any(group.window_blocks for group in self.groups)

    def aligned(self, tokens: int) -> int:
        """Returns the longest hit of at most ``tokens`` tokens."""
        return tokens - tokens % self.hit_tokens

    @property
    def recomputes_by_block(self) -> bool:
        """Whether vLLM can recompute from the first block that a load failed to bring; else it recomputes the request.

        It cannot with several groups, nor from within a state.
        """
        return len(self.groups) == 1 and not self.groups[0].keeps_state


def geometry(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> Geometry:
    """Returns the groups of a cache configuration, of a worker or of the scheduler."""
    try:
        return _supported(vllm_config, kv_cache_config)
    except _UnsupportedError as reason:
        return Geometry((), 1, 1, str(reason))


class _UnsupportedError(Exception):
    """Reason why a model's cache cannot be stored by block."""


def _supported(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> Geometry:
    all_groups = kv_cache_config.kv_cache_groups
    if not all_groups:
        raise _UnsupportedError("the model has no KV cache")
    if problem := problem_of_groups(len(all_groups)) or computes_all_tokens(vllm_config.model_config):
        raise _UnsupportedError(problem)
    if getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1) > 1:
        raise _UnsupportedError("prefill context parallelism is not supported")
    if any(getattr(group, "host_resident", False) for group in all_groups):
        raise _UnsupportedError("HiSparse keeps KV in its own host memory, in blocks other than the device's")
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    # A store addressed by hash holds the prefix-cacheable groups only: vLLM rebuilds the others.
    indexes = getattr(kv_cache_config, "prefix_cacheable_group_ids", range(len(all_groups)))
    if not indexes:
        raise _UnsupportedError("vLLM cannot find this model's KV cache by its hash")
    # Unsupported caches are rejected first: vLLM's own arithmetic may not hold for them.
    reaches = {index: _reach(all_groups[index]) for index in indexes}
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    hit_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    groups = []
    for index in indexes:
        spec = all_groups[index].kv_cache_spec
        span = spec.block_size * (dcp if getattr(spec, "dcp_sharded", True) else 1)
        if span % hash_tokens:
            raise _UnsupportedError(f"blocks of {span} tokens are not whole numbers of hashes of {hash_tokens} tokens")
        groups.append(
            Group(
                index=index,
                layer_names=tuple(all_groups[index].layer_names),
                spec=spec,
                block_tokens=span,
                hashes_per_block=span // hash_tokens,
                window_blocks=reaches[index].blocks(span),
                keeps_state=reaches[index].state,
            )
        )
    if all(group.keeps_state for group in groups):
        raise _UnsupportedError("this model has states only (Mamba without attention), which has not been tested")
    return Geometry(tuple(groups), hash_tokens, hit_tokens)


def computes_all_tokens(model_config: "ModelConfig") -> str:
    """Returns why every token of a prompt has to go through the model, whatever is stored of it; empty if not."""
    if getattr(model_config, "pooler_config", None) is None or model_config.is_prefix_caching_supported:
        return ""
    return "this model pools over all tokens of a prompt, and vLLM fails when a part of them comes from a cache"


@dataclass(frozen=True)
class _Reach:
    """How far back a layer reads: a window that ends with the next token, the current chunk, the last state, or all."""

    window: int = 0
    chunk: int = 0
    state: bool = False

    def blocks(self, span: int) -> int:
        """Returns the most blocks of ``span`` tokens that are read before a hit's end, a block boundary; 0 = all."""
        if self.state:
            return 1
        if self.chunk:
            # A hit that ends with a chunk needs nothing of it; the longest rest of a chunk is one step shorter than it.
            return max(1, math.ceil((self.chunk - math.gcd(self.chunk, span)) / span))
        return max(1, math.ceil((self.window - 1) / span)) if self.window else 0


def layer_specs(spec: "KVCacheSpec") -> "list[KVCacheSpec]":
    """Returns the specs of a group's layers if they differ, else the common one."""
    inner = getattr(spec, "kv_cache_specs", None)
    return [spec] if inner is None else list(inner.values())


def _reach(group: "KVCacheGroupSpec") -> _Reach:
    found = {_reach_of(spec) for spec in layer_specs(group.kv_cache_spec)}
    if len(found) != 1:
        raise _UnsupportedError("layers with different windows share one block table")
    return found.pop()


def _reach_of(spec: "KVCacheSpec") -> _Reach:
    from vllm.v1 import kv_cache_interface as kinds

    if isinstance(spec, getattr(kinds, "RSWASpec", ())):
        raise _UnsupportedError("blocks of RSWASpec are recycled while a request runs")
    if isinstance(spec, kinds.SlidingWindowSpec):
        # The window of the next token, which is one of them.
        return _Reach(window=spec.sliding_window + getattr(spec, "extra_retained_tokens", 0))
    if isinstance(spec, kinds.ChunkedLocalAttentionSpec):
        return _Reach(chunk=spec.attention_chunk_size)
    if isinstance(spec, kinds.FullAttentionSpec):
        return _Reach()
    if isinstance(spec, kinds.MambaSpec):
        return _reach_of_state(spec)
    raise _UnsupportedError(f"cache of kind {type(spec).__name__} is not stored by block")


def _reach_of_state(spec: "MambaSpec") -> _Reach:
    """Returns the reach of a state that vLLM keeps at block boundaries, as in its own prefix cache."""
    if spec.mamba_cache_mode != "align":
        raise _UnsupportedError(
            f"with --mamba-cache-mode {spec.mamba_cache_mode} vLLM keeps no state at the end of a block: "
            "use align, with prefix caching"
        )
    if spec.num_speculative_blocks:
        raise _UnsupportedError("speculative decoding moves states after a step, when they have been stored")
    if problem := problem_of_states():
        raise _UnsupportedError(problem)
    return _Reach(state=True)
