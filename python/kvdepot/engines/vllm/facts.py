"""The facts that make a namespace (P8): everything that changes the bytes of a block and is not in its hash."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvdepot.engines.vllm.groups import Group
from kvdepot.engines.vllm.pages import GroupPages
from kvdepot.engines.vllm.ranks import Rank
from kvdepot.engines.vllm.weights import local_directory, weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SPEC_TEXT_MAX = 600
HASHES_WITHOUT_COLLISION_RESISTANCE = ("xxhash", "xxhash_cbor")


def engine_facts(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> dict[str, object]:
    """What holds for all groups and ranks of an engine."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    directory = local_directory(model.model, getattr(model, "revision", None))
    return {
        "engine": "vllm",
        "engine_version": ".".join(_vllm_version().split(".")[:2]),
        "model": _model_name(model.model),
        "revision": str(getattr(model, "revision", None) or ""),
        "config_digest": config_digest(model.hf_config),
        "weights_digest": weights_digest(directory) if directory is not None else "",
        "quantization": str(model.quantization or ""),
        "load_format": str(getattr(vllm_config.load_config, "load_format", "")),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "layout": str(getattr(kv_cache_config, "kv_cache_layout", None) or ""),
        "dcp": parallel.decode_context_parallel_size,
        "dcp_interleave": int(getattr(parallel, "cp_kv_cache_interleave_size", 1)),
        "draft": _draft_digest(vllm_config),
        "hash": hash_facts(vllm_config),
    }


def group_facts(engine: dict[str, object], group: Group, pages: GroupPages, rank: Rank, backend: str) -> str:
    """The facts of one group's pages on one rank, as the JSON that ``Depot.open_namespace`` takes."""
    facts = {
        **engine,
        "backend": backend,
        "block_tokens": group.block_tokens,
        "layers": layer_ranges(pages.layer_names),
        "form": list(pages.forms),
        "spec": _spec_text(group.spec),
        "kv_shards": rank.kv_shards,
        "kv_shard": rank.kv_shard,
        "dcp_rank": rank.dcp_rank,
    }
    return json.dumps(facts, sort_keys=True)


def _spec_text(spec: Any) -> str:
    """The group's cache spec in words; one that lists every layer by its digest."""
    text = re.sub(r"\s+", " ", repr(spec))
    if len(text) <= SPEC_TEXT_MAX:
        return text
    return f"{type(spec).__name__}:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def layer_ranges(names: Sequence[str]) -> list[str]:
    """``model.layers.{0-31}.attn`` for 32 layers: short, readable, and different for different layers or order."""
    found: list[tuple[str, list[list[int]]]] = []
    for name in names:
        numbers = re.findall(r"\d+", name)
        if not numbers or "{" in name:
            found.append((name, []))
            continue
        pattern, number = re.sub(r"\d+", "{}", name, count=1), int(numbers[0])
        if found and found[-1][0] == pattern and found[-1][1]:
            ranges = found[-1][1]
            if ranges[-1][1] + 1 == number:
                ranges[-1][1] = number
            else:
                ranges.append([number, number])
        else:
            found.append((pattern, [[number, number]]))
    texts = []
    for pattern, ranges in found:
        spans = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
        texts.append(pattern.replace("{}", "{" + spans + "}") if ranges else pattern)
    return texts


def config_digest(hf_config: Any) -> str:
    """Digest of the model's configuration with the user's overrides; who wrote the file and when is left out."""
    values = {k: v for k, v in hf_config.to_dict().items() if k not in ("transformers_version", "_name_or_path")}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:32]


def hash_facts(vllm_config: "VllmConfig") -> str:
    """How block hashes come about: algorithm, seed, and for the pickled ones the interpreter that pickles."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED")
    pickled = "" if algorithm.endswith("_cbor") else f"/py{sys.version_info[0]}.{sys.version_info[1]}"
    return f"{algorithm}{pickled}/{'default' if seed is None else hashlib.sha256(seed.encode()).hexdigest()[:8]}"


def unstable_hashes(vllm_config: "VllmConfig") -> str:
    """Empty, or why block hashes of this engine mean nothing to another process, and what to do."""
    if os.environ.get("PYTHONHASHSEED") is not None:
        return ""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm in HASHES_WITHOUT_COLLISION_RESISTANCE:
        return (
            f"--prefix-caching-hash-algo {algorithm} seeds its hashes at random in every process: use sha256 or "
            "sha256_cbor, or set PYTHONHASHSEED to the same number for every engine"
        )
    from vllm.v1.core import kv_cache_utils

    if not hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED"):
        return (
            f"vLLM {_vllm_version()} seeds its block hashes at random in every process: set PYTHONHASHSEED=0 (the same "
            "number for every engine), or use vLLM 0.29 or later"
        )
    return ""


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


def _model_name(model: str) -> str:
    """A path is no identity: the same files may lie elsewhere on another node. Its digest says which they are."""
    return os.path.basename(os.path.normpath(model)) if os.path.exists(model) else model


def _draft_digest(vllm_config: "VllmConfig") -> str:
    """The draft model's layers lie in the cache beside the model's own."""
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is None:
        return ""
    directory = local_directory(draft.model, getattr(draft, "revision", None))
    return f"{config_digest(draft.hf_config)}/{weights_digest(directory) if directory is not None else ''}"
