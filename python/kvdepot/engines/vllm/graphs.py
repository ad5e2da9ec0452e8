"""Whether vLLM may replay whole CUDA graphs with this connector.

A replayed graph runs no Python: the hooks of its layers are skipped, so a step would not wait for a load layer by
layer. Nothing else in the connector needs the hooks. So only an engine whose steps may load is required to keep its
attention out of its graphs (``PIECEWISE``), which slows every decode step.
"""

from typing import TYPE_CHECKING

from kvdepot.engines.vllm.groups import computes_all_tokens
from kvdepot.engines.vllm_plugin import NAMES

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ModelConfig, ParallelConfig, VllmConfig


def steps_may_load(vllm_config: "VllmConfig") -> bool:
    """Returns whether steps of this engine may load layer by layer, as far as known before its KV cache is laid out.

    False if it only stores, if its model's cache is not stored by block, or if it has several KV-cache groups, which
    load between steps. True if in doubt.
    """
    model = vllm_config.model_config
    return any(role in (None, "kv_both", "kv_consumer") for role in own_roles(vllm_config.kv_transfer_config)) and not (
        model is not None and (loads_between_steps(model, vllm_config.parallel_config) or has_groups(vllm_config))
    )


def own_roles(transfer: "KVTransferConfig | None") -> list[str | None]:
    """Returns the connector's role, or those of its entries below `MultiConnector`."""
    if transfer is None or transfer.kv_connector in NAMES:
        return [getattr(transfer, "kv_role", None)]
    children = (transfer.kv_connector_extra_config or {}).get("connectors") or ()
    return [child.get("kv_role") for child in children if child.get("kv_connector") in NAMES] or [None]


def loads_between_steps(model: "ModelConfig", parallel: "ParallelConfig") -> bool:
    """Returns whether no step of this model will wait for a load, whatever its KV cache looks like.

    Hybrids with states load between steps; for the others the connector is off.
    """
    return bool(
        computes_all_tokens(model)
        or model.is_hybrid
        or getattr(model, "is_attention_free", False)
        or getattr(model, "is_encoder_decoder", False)
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    )


def has_groups(vllm_config: "VllmConfig") -> bool:
    """Returns whether layers of several kinds will be in separate KV-cache groups."""
    from vllm.platforms import current_platform

    kinds = set(getattr(vllm_config.model_config.hf_text_config, "layer_types", None) or ())
    return (
        len(kinds) > 1
        and vllm_config.scheduler_config.disable_hybrid_kv_cache_manager is not True
        and getattr(vllm_config.model_config, "attention_chunk_size", None) is None
        and current_platform.support_hybrid_kv_cache()
    )


def may_replay_whole_steps(vllm_config: "VllmConfig") -> bool:
    """Returns whether a step may be one graph: then loads run between steps, whatever was known earlier (P1)."""
    mode = vllm_config.compilation_config.cudagraph_mode
    return mode is not None and mode.has_full_cudagraphs()
