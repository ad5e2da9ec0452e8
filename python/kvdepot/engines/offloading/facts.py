"""The facts that make a tier's namespace (P8), and the engines that a tier cannot serve.

vLLM gives a tier little of its configuration: neither the model's own nor how its weights were loaded. All of that is
in the frames of the callers that make the tier.
"""

import importlib.metadata
import os
import sys
from types import FrameType
from typing import Any, NamedTuple

from kvdepot.engines.offloading.options import Options
from kvdepot.engines.vllm.facts import engine_facts, layer_ranges, names_weights, spec_text, unstable_hashes
from kvdepot.errors import config_error

FORMAT = 1
"""Raised when what is stored of a chunk, or how its key becomes a hash, changes."""
CHUNK_BYTES_MAX = 1 << 30
"""A block of the depot has at most so many bytes."""
FRAMES_MAX = 64
ATTENTION_VARIABLES = ("VLLM_ATTENTION_BACKEND", "VLLM_KV_CACHE_LAYOUT")
ATTENTION_PACKAGES = ("flashinfer-python", "flash-attn")
"""What vLLM chooses an attention backend by when it is not told which, beside its version and the device."""
ONE_NODE = ("mp", "uni")
"""Ways of vLLM to run its ranks in which they are on its scheduler's node unless it says how many nodes there are."""


class Engine(NamedTuple):
    """What vLLM was started with: its ``VllmConfig`` and ``KVCacheConfig``."""

    vllm_config: Any
    kv_cache_config: Any


def calling_engine() -> Engine:
    """The engine whose scheduler is being made by a caller.

    Raises:
        ConfigError: there is none, as in a release of vLLM that makes its tiers another way.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - vLLM passes none of this
    for _ in range(FRAMES_MAX):
        if frame is None:
            break
        vllm_config, kv_cache_config = (frame.f_locals.get(name) for name in ("vllm_config", "kv_cache_config"))
        if hasattr(vllm_config, "model_config") and hasattr(kv_cache_config, "kv_cache_groups"):
            return Engine(vllm_config, kv_cache_config)
        frame = frame.f_back
    raise config_error(
        "this vLLM does not tell its model where it makes secondary tiers, so its KV cannot be named: use vLLM 0.32, "
        "or KVDepotConnector"
    )


def refuse_unsupported(engine: Engine, options: Options, chunk_bytes: int) -> None:
    """Refuses what would be wrong, or never found.

    Raises:
        ConfigError: the engine's ranks are on several nodes, its adapters cannot be told apart, its hashes last as long
            as the process, its weights will be replaced and the tier was told to go on, or a chunk is too large.
    """
    vllm_config = engine.vllm_config
    parallel = vllm_config.parallel_config
    ranks, way = parallel.world_size, parallel.distributed_executor_backend
    nodes = getattr(parallel, "nnodes_within_dp", 1)
    if nodes > 1 or (ranks > 1 and way not in ONE_NODE):
        raise config_error(
            f"{ranks} ranks run by {way!r} on {nodes} nodes: a tier sees the memory of its scheduler's node alone, so "
            "the others would load nothing: use KVDepotConnector, or --distributed-executor-backend mp on one node"
        )
    if vllm_config.lora_config is not None and not options.adapters_version:
        raise config_error(
            "adapters_version: missing, and LoRA is on: vLLM's keys have an adapter's name and path, and not its "
            "content: set adapters_version to a name that changes whenever any adapter does, or use KVDepotConnector"
        )
    if options.on_reset == "keep" and getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise config_error(
            "on_reset: keep, and the engine takes new weights while it runs (--weight-transfer-config): KV of the "
            "earlier ones would be served: remove the key"
        )
    if problem := unstable_hashes(vllm_config):
        raise config_error(f"kvdepot would never find a chunk again: {problem}")
    if not 0 < chunk_bytes <= CHUNK_BYTES_MAX:
        raise config_error(
            f"a chunk of vLLM's has {chunk_bytes} bytes, a block of the depot 1 to {CHUNK_BYTES_MAX}: set block_size "
            "or blocks_per_chunk of kv_connector_extra_config lower"
        )


def chunk_facts(spec: Any, engine: Engine, options: Options) -> dict[str, object]:
    """Everything that changes a chunk's bytes and is neither in its key nor in its length.

    Args:
        spec: vLLM's ``OffloadingSpec``.
        engine: what vLLM was started with.
        options: of the tier.

    Raises:
        ConfigError: nothing tells the weights from others.
    """
    config, parallel = spec.config, spec.config.parallel
    facts = engine_facts(engine.vllm_config, engine.kv_cache_config, options.weights_version)
    if not names_weights(facts):
        raise config_error(
            f"weights_version: missing, and no weight files of {config.model.name} were found on this machine: set "
            "weights_version to a name that changes whenever the weights do"
        )
    return {
        **facts,
        "face": "offloading",
        "format": FORMAT,
        # The order of tensors within a chunk is vLLM's own matter, of any release.
        "engine_version": importlib.metadata.version("vllm"),
        "attention": _attention(engine.vllm_config),
        "groups": [
            {
                "group": group.group_id,
                "tokens": group.tokens_per_block,
                "layers": layer_ranges(group.layer_names),
                "spec": spec_text(engine.kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec),
            }
            for group in config.groups
        ],
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "ranks": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "one_copy": bool(getattr(spec, "replicated_layout", False)),
        "canonical": bool(config.canonical_layout),
        "adapters": options.adapters_version,
    }


def _attention(vllm_config: Any) -> dict[str, str]:
    """What vLLM chooses its attention backend by: the scheduler's process does not know what it has chosen."""
    from vllm.platforms import current_platform

    asked = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    found = {"asked": str(getattr(asked, "name", asked) or ""), "device": str(current_platform.device_type)}
    try:
        found["capability"] = str(current_platform.get_device_capability() or "")
    except Exception:  # noqa: BLE001 - a platform that has none
        found["capability"] = ""
    for name in ATTENTION_VARIABLES:
        if value := os.environ.get(name):
            found[name] = value
    found.update((name, _version(name)) for name in ATTENTION_PACKAGES)
    return found


def _version(package: str) -> str:
    """The version of a package; empty when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
