"""Which slice of the KV cache this worker holds, and which part of it the worker dumps."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.engines.vllm.groups import layer_specs
from kvdepot.engines.vllm.shares import ALONE, Share

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


@dataclass(frozen=True)
class Rank:
    """A worker's position.

    Attributes:
        kv_shards: number of different slices of a token's KV over the tensor-parallel ranks; 1 for MLA, whose latent KV
            is the same on all of them.
        kv_shard: index of the slice that this worker holds.
        dcp_rank: index of the token, of every ``dcp``, that this worker holds under decode context parallelism.
        share: the worker's share of the dumps: ranks with equal bytes divide the blocks.
    """

    kv_shards: int
    kv_shard: int
    dcp_rank: int
    share: Share = ALONE


def this_rank(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> Rank:
    """Returns this worker's position. Only in a worker with initialized process groups."""
    from vllm.distributed import parallel_state

    parallel = vllm_config.parallel_config
    tp, dcp = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    tp_rank = parallel_state.get_tp_group().rank_in_group
    # vLLM tells how many consecutive ranks hold the same bytes; in a version that does not, each of them stores them.
    replicas: int = getattr(kv_cache_config, "kv_tp_replicas", 1)
    if dcp == 1 or replicas > 1:
        return Rank(tp // replicas, tp_rank // replicas, 0, Share(tp_rank % replicas, replicas))
    # Consecutive ranks hold different tokens.
    dcp_rank = parallel_state.get_dcp_group().rank_in_group
    if all(_is_latent(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups):
        # Latent KV differs only by that: ranks at the same position in their groups hold equal bytes. vLLM forms the
        # groups from consecutive ranks.
        return Rank(kv_shards=1, kv_shard=0, dcp_rank=dcp_rank, share=Share(tp_rank // dcp, tp // dcp))
    return Rank(kv_shards=tp, kv_shard=tp_rank, dcp_rank=dcp_rank)


def _is_latent(spec: "KVCacheSpec") -> bool:
    """Returns whether every layer's KV is one slice, whatever the number of ranks, and is distributed by tokens."""
    return all(
        getattr(layer, "max_tp_shards", None) == 1 and getattr(layer, "dcp_sharded", False)
        for layer in layer_specs(spec)
    )


def tensor_rank() -> int:
    """Returns this worker's index among the tensor-parallel ranks. Only in a worker with initialized process groups."""
    from vllm.distributed import parallel_state

    return int(parallel_state.get_tp_group().rank_in_group)


def rank_number(vllm_config: "VllmConfig") -> int:
    """Returns this worker's index in the engine. Only in a worker with initialized process groups."""
    from vllm.distributed import parallel_state

    stage = parallel_state.get_pp_group().rank_in_group
    size: int = vllm_config.parallel_config.tensor_parallel_size
    return int(stage * size + parallel_state.get_tp_group().rank_in_group)


def is_last_stage(vllm_config: "VllmConfig") -> bool:
    """Returns whether this worker is in the last pipeline stage. Only in a worker with initialized process groups."""
    from vllm.distributed import parallel_state

    stages: int = vllm_config.parallel_config.pipeline_parallel_size
    return int(parallel_state.get_pp_group().rank_in_group) == stages - 1


def attention_backends(vllm_config: "VllmConfig", layer_names: tuple[str, ...]) -> str:
    """Returns the names of the layers' attention backends, and the CPU's instruction set if it affects K's packing.

    Raises:
        ValueError: vLLM does not say which backends they are, so the blocks cannot be told from others (P8).
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

        found = get_current_attn_backends(vllm_config, list(layer_names))
    except (ImportError, AssertionError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"vLLM does not say which attention backends {layer_names[0]} … have: {why}") from error
    names = sorted({f"{backend.__module__}.{backend.__qualname__}" for backend in found})
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        names.append(_cpu_isa())
    return "+".join(names)


def _cpu_isa() -> str:
    """Returns the processor flags that ``cpu_attn`` depends on. The block size and dtype are facts of their own."""
    import torch

    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported", "_is_avx512_supported", "_is_avx2_supported")
    return "cpu:" + "".join("1" if getattr(torch.cpu, name, bool)() else "0" for name in names)
