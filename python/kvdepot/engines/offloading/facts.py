"""The facts of a tier's namespace (P8), and the engines that a tier cannot serve.

vLLM passes a tier neither the model's configuration nor how its weights were loaded. Both are read from the frames of
the callers that create the tier.
"""

import importlib.metadata
import os
import sys
from types import FrameType
from typing import Any, NamedTuple

from kvdepot.engines.offloading.options import Options
from kvdepot.engines.vllm.facts import engine_facts, layer_ranges, names_weights, spec_text, unstable_hashes
from kvdepot.engines.vllm.groups import layer_specs
from kvdepot.engines.vllm.option_facts import lora_options
from kvdepot.errors import ConfigError

FORMAT = 1
"""Incremented when the stored form of a chunk or its key changes."""
CHUNK_BYTES_MAX = 1 << 30
"""Maximum size of a block in the depot."""
FRAMES_MAX = 64
ATTENTION_VARIABLES = ("VLLM_ATTENTION_BACKEND", "VLLM_KV_CACHE_LAYOUT")
ATTENTION_PACKAGES = ("flashinfer-python", "flash-attn")
"""Packages that influence which attention backend vLLM selects, besides its version and the device."""
RECYCLED = "RSWASpec"
"""Attention whose blocks are recycled although vLLM counts it as full attention."""
ONE_NODE = ("mp", "uni")
"""Executor backends whose ranks run on the scheduler's node, unless the number of nodes says otherwise."""


class Engine(NamedTuple):
    """vLLM's ``VllmConfig`` and ``KVCacheConfig``."""

    vllm_config: Any
    kv_cache_config: Any


def calling_engine() -> Engine:
    """Returns the engine whose scheduler a caller is creating.

    Raises:
        ConfigError: no caller has one. Other releases of vLLM may create their tiers differently.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - vLLM passes none of this
    for _ in range(FRAMES_MAX):
        if frame is None:
            break
        vllm_config, kv_cache_config = (frame.f_locals.get(name) for name in ("vllm_config", "kv_cache_config"))
        if hasattr(vllm_config, "model_config") and hasattr(kv_cache_config, "kv_cache_groups"):
            return Engine(vllm_config, kv_cache_config)
        frame = frame.f_back
    raise ConfigError(
        "this vLLM release hides its model's configuration from secondary tiers, so its KV cannot be identified: use "
        "vLLM 0.32, or KVDepotConnector"
    )


def refuse_unsupported(engine: Engine, options: Options, chunk_bytes: int, blocks_per_chunk: int) -> None:
    """Refuses engines whose KV would be wrong or never be found.

    Args:
        engine: vLLM's configuration.
        options: the tier's options.
        chunk_bytes: size of a chunk.
        blocks_per_chunk: GPU blocks per chunk.

    Raises:
        ConfigError: the ranks are on several nodes, adapters cannot be identified, hashes change with every process,
            ``on_reset: keep`` is combined with new weights or with windows, chunks may be wrong or incomplete, or a
            chunk is too large.
    """
    vllm_config = engine.vllm_config
    parallel = vllm_config.parallel_config
    ranks, way = parallel.world_size, parallel.distributed_executor_backend
    nodes = getattr(parallel, "nnodes_within_dp", 1)
    if nodes > 1 or (ranks > 1 and way not in ONE_NODE):
        raise ConfigError(
            f"{ranks} ranks run by {way!r} on {nodes} nodes: a tier reaches the scheduler's node only, so "
            "other nodes would load nothing: use --distributed-executor-backend mp on one node, or KVDepotConnector, "
            "which on several nodes needs a tier that all of them share"
        )
    if vllm_config.lora_config is not None and not options.adapters_version:
        raise ConfigError(
            "adapters_version: missing, but LoRA is enabled: vLLM's keys contain an adapter's name and path, not its "
            "contents: set adapters_version to a name that changes whenever any adapter does, or use KVDepotConnector"
        )
    if options.on_reset == "keep" and getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ConfigError(
            "on_reset: keep cannot be used with --weight-transfer-config: after an update of the weights, KV of the "
            "old ones would be served: remove the key"
        )
    if problem := unstable_hashes(vllm_config):
        raise ConfigError(f"kvdepot would never find a stored chunk again: {problem}")
    kinds = _forgetful(engine.kv_cache_config)
    if RECYCLED in kinds:
        raise ConfigError(
            f"the model has layers of {RECYCLED}, whose blocks vLLM gives to other requests while the first one still "
            "runs, so it may offload bytes of one request as those of another: remove KVDepotTier from secondary_tiers"
        )
    if options.on_reset == "keep" and kinds:
        raise ConfigError(
            f"on_reset: keep cannot be used with {', '.join(kinds)}, which gives back blocks that have left its "
            "window: after a reset, vLLM offers the chunks of running requests again, and such blocks may belong to "
            "other requests by then, so wrong KV would be stored for all engines: remove the key, or use "
            "KVDepotConnector"
        )
    if blocks_per_chunk > 1 and kinds:
        raise ConfigError(
            f"a chunk of vLLM's has {blocks_per_chunk} GPU blocks, but {', '.join(kinds)} gives back blocks that have "
            "left its window, so vLLM would offload chunks with parts that it never wrote: remove block_size and "
            "blocks_per_chunk from kv_connector_extra_config, or use KVDepotConnector"
        )
    if not 0 < chunk_bytes <= CHUNK_BYTES_MAX:
        raise ConfigError(
            f"a chunk of vLLM's has {chunk_bytes} bytes, but a block of the depot has 1 to {CHUNK_BYTES_MAX}: lower "
            "block_size or blocks_per_chunk in kv_connector_extra_config"
        )


def windowed_groups(engine: Engine) -> frozenset[int]:
    """Returns the indexes of the cache groups that do not keep every block of a running request."""
    groups = engine.kv_cache_config.kv_cache_groups
    return frozenset(index for index, group in enumerate(groups) if _forgets(group))


def _forgetful(kv_cache_config: Any) -> list[str]:
    """Returns the kinds of caches that do not keep every block of a running request, sorted."""
    return sorted({kind for group in kv_cache_config.kv_cache_groups for kind in _forgets(group)})


def _forgets(group: Any) -> set[str]:
    """Returns the kinds of caches of a group that do not keep every block of a running request."""
    from vllm.v1 import kv_cache_interface as interface

    recycled = getattr(interface, RECYCLED, ())
    return {
        type(spec).__name__
        for spec in layer_specs(group.kv_cache_spec)
        if not isinstance(spec, interface.FullAttentionSpec) or isinstance(spec, recycled)
    }


def chunk_facts(spec: Any, engine: Engine, options: Options) -> dict[str, object]:
    """Returns everything that changes a chunk's bytes and that neither its key nor its length reflects.

    Args:
        spec: vLLM's ``OffloadingSpec``.
        engine: vLLM's configuration.
        options: the tier's options.

    Raises:
        ConfigError: the weights cannot be identified.
    """
    config, parallel = spec.config, spec.config.parallel
    facts = engine_facts(engine.vllm_config, engine.kv_cache_config, options.weights_version)
    if not names_weights(facts):
        raise ConfigError(
            f"weights_version: missing, and no weight files of {config.model.name} were found on this machine: set "
            "weights_version to a name that changes whenever the weights do"
        )
    return {
        **facts,
        "face": "offloading",
        "format": FORMAT,
        # Any release of vLLM may change the order of tensors within a chunk.
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
        # The scheduler sees one type per group, but these layers have another one.
        "unquantized": sorted(engine.vllm_config.cache_config.kv_cache_dtype_skip_layers),
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "ranks": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "one_copy": bool(getattr(spec, "replicated_layout", False)),
        "canonical": bool(config.canonical_layout),
        "adapters": options.adapters_version,
        **({"adapter_options": found} if (found := lora_options(engine.vllm_config)) else {}),
    }


def _attention(vllm_config: Any) -> dict[str, str]:
    """Returns what determines vLLM's choice of an attention backend, which the scheduler's process does not know."""
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
    """Returns the version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
