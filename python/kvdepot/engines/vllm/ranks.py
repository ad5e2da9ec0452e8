"""Which slice of the KV cache this worker holds, and whether it is the one that dumps it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdepot.engines.vllm.groups import layer_specs
from kvdepot.engines.vllm.shares import ALONE, Share

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class Rank:
    """A worker's place.

    Attributes:
        kv_shards: different slices of a token's KV over the tensor-parallel ranks; 1 for MLA, whose latent KV is the
            same on all of them.
        kv_shard: which of them this worker holds.
        dcp_rank: which of every ``dcp`` tokens this worker holds under decode context parallelism.
        share: what this worker dumps: ranks with equal bytes share the blocks.
    """

    kv_shards: int
    kv_shard: int
    dcp_rank: int
    share: Share = ALONE


def this_rank(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> Rank:
    """This worker's place; only in a worker, after its process groups are there."""
    from vllm.distributed import parallel_state

    parallel = vllm_config.parallel_config
    tp, dcp = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    tp_rank = parallel_state.get_tp_group().rank_in_group
    # vLLM says how many ranks in a row hold the same bytes; what a version does not say is stored by each of them.
    replicas: int = getattr(kv_cache_config, "kv_tp_replicas", 1)
    if dcp == 1 or replicas > 1:
        return Rank(tp // replicas, tp_rank // replicas, 0, Share(tp_rank % replicas, replicas))
    # Ranks that follow each other hold different tokens.
    dcp_rank = parallel_state.get_dcp_group().rank_in_group
    if all(_is_latent(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups):
        # Latent KV differs by nothing else: ranks of the same place in their groups hold equal bytes. vLLM makes the
        # groups of ranks that follow each other.
        return Rank(kv_shards=1, kv_shard=0, dcp_rank=dcp_rank, share=Share(tp_rank // dcp, tp // dcp))
    return Rank(kv_shards=tp, kv_shard=tp_rank, dcp_rank=dcp_rank)


def _is_latent(spec: Any) -> bool:
    """Whether all layers have one slice of KV, whatever the number of ranks, and share its tokens out."""
    return all(
        getattr(layer, "max_tp_shards", None) == 1 and getattr(layer, "dcp_sharded", False)
        for layer in layer_specs(spec)
    )


def tensor_rank() -> int:
    """This worker's number among the tensor-parallel ranks; only in a worker, after its process groups are there."""
    from vllm.distributed import parallel_state

    return int(parallel_state.get_tp_group().rank_in_group)


def rank_number(vllm_config: "VllmConfig") -> int:
    """Which of the engine's workers this is; only in a worker, after its process groups are there."""
    from vllm.distributed import parallel_state

    stage = parallel_state.get_pp_group().rank_in_group
    size: int = vllm_config.parallel_config.tensor_parallel_size
    return int(stage * size + parallel_state.get_tp_group().rank_in_group)


def attention_backends(vllm_config: "VllmConfig", layer_names: tuple[str, ...]) -> str:
    """Names of the layers' attention backends, and the CPU's instruction set where it decides how K is packed."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends

        found = get_current_attn_backends(vllm_config, list(layer_names))
        names = sorted({f"{backend.__module__}.{backend.__qualname__}" for backend in found})
    except (ImportError, AssertionError, KeyError, TypeError):
        names = []
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        names.append(_cpu_isa())
    return "+".join(names)


def _cpu_isa() -> str:
    """What ``cpu_attn`` decides by: flags of the processor. The block size and dtype are facts of their own."""
    import torch

    names = ("_is_amx_tile_supported", "_is_avx512_bf16_supported", "_is_avx512_supported", "_is_avx2_supported")
    return "cpu:" + "".join("1" if getattr(torch.cpu, name, bool)() else "0" for name in names)
