"""vLLM's own offloading with the depot as its secondary tier: what a `Lab` starts instead of the connector."""

from collections.abc import Callable
from typing import Any

CHUNK_TOKENS = 32
MEMORY_BYTES = 64 << 20
"""Of vLLM's own tier in host memory: more than all prompts of a test."""

ON_A_CPU = {"spec_name": "HostTieringSpec", "spec_module_path": "benches.engine.native_offload_shim"}
"""vLLM has copies for GPUs alone."""
IDLE = {"do": "offloaded"}
FORGET = {"do": "forget_offloaded"}


def tier_of(transfer: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """The tier's entry for the depot of a connector's configuration."""
    return {
        "type": "KVDepotTier",
        "module_path": "kvdepot.engines.offloading",
        **transfer["kv_connector_extra_config"],
        **extra,
    }


def offloading(memory_bytes: int = MEMORY_BYTES, **extra: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """For a lab's ``beside``: vLLM's offloading, with its copies on a CPU, above the lab's depot."""

    def wrap(transfer: dict[str, Any]) -> dict[str, Any]:
        depot = {k: v for k, v in transfer["kv_connector_extra_config"].items() if k != "load_policy"}
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                **ON_A_CPU,
                "cpu_bytes_to_use": memory_bytes,
                "secondary_tiers": [tier_of({"kv_connector_extra_config": depot}, **extra)],
            },
        }

    return wrap
