"""The facts of a namespace (P8): everything that changes the bytes of a block and is not in its hash."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvdepot.engines.vllm.groups import Group
from kvdepot.engines.vllm.option_facts import option_facts
from kvdepot.engines.vllm.pages import GroupPages
from kvdepot.engines.vllm.ranks import Rank
from kvdepot.engines.vllm.slices import HeadSlices
from kvdepot.engines.weights import local_directory, model_digest

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SPEC_TEXT_MAX = 600
HASHES_WITHOUT_COLLISION_RESISTANCE = ("xxhash", "xxhash_cbor")


FILE_FORMATS = (
    "auto",
    "hf",
    "safetensors",
    "pt",
    "npcache",
    "fastsafetensors",
    "instanttensor",
    "mistral",
    "runai_streamer",
    "runai_streamer_sharded",
    "sharded_state",
    "gguf",
    "bitsandbytes",
)
"""Load formats that read the weights from the model's own files, wherever those are."""

MEDIA_SETTINGS = (
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
"""Settings of vLLM's ``MultiModalConfig`` that change what an engine computes from the same media."""

METHODS_WITHOUT_KV = ("medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix")
"""Methods of speculation that add no layer to the KV cache: n-grams and suffixes have no model, heads no attention.

For some of them vLLM names the engine's own model as the draft's.
"""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def engine_facts(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", weights_version: str = ""
) -> dict[str, object]:
    """Returns the facts shared by all groups and ranks of an engine.

    Paths, names and load formats are left out if the weights are known by their content: by P8, no superfluous facts.

    Raises:
        ValueError: a fact cannot be found.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    facts: dict[str, object] = {
        "engine": "vllm",
        "engine_version": ".".join(_vllm_version().split(".")[:2]),
        "config_digest": config_digest(model.hf_config),
        **weights_facts(model, vllm_config.load_config, weights_version),
        **length_facts(model),
        **media_facts(model),
        "quantization": str(model.quantization or ""),
        **override_facts(model),
        **option_facts(vllm_config, kv_cache_config),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "layout": _layout(kv_cache_config),
        "dcp": parallel.decode_context_parallel_size,
        "dcp_interleave": int(parallel.cp_kv_cache_interleave_size),
        **draft_facts(vllm_config),
        "hash": hash_facts(vllm_config),
    }
    return facts


def _layout(kv_cache_config: "KVCacheConfig") -> str:
    if kv_cache_config.kv_cache_layout is None:
        raise ValueError("vLLM has not said which layout the KV cache has")
    return str(kv_cache_config.kv_cache_layout)


def weights_facts(model: "ModelConfig", load_config: "LoadConfig", declared: str = "") -> dict[str, object]:
    """Returns the digest of the weights' files; if it is unknown, also everything else that identifies the weights."""
    load_format = _load_format(load_config)
    digest = _files_digest(model, load_config.download_dir) if load_format in FILE_FORMATS else ""
    facts: dict[str, object] = {"weights_digest": digest}
    if declared:
        facts["weights_declared"] = declared
    if not digest:
        facts["model"] = _model_name(model.model)
        facts["revision"] = str(model.revision or "")
        facts["load_format"] = load_format
    return facts


def _load_format(load_config: "LoadConfig") -> str:
    return str(getattr(load_config.load_format, "value", load_config.load_format)).lower()


def names_weights(facts: dict[str, object]) -> bool:
    """Returns whether the facts distinguish an engine's weights from others, and those of its draft."""
    return bool(facts.get("weights_declared") or (facts["weights_digest"] and "draft_model" not in facts))


def _files_digest(model: "ModelConfig", cache: str | None) -> str:
    return model_digest(model.model, model.revision, cache)


def length_facts(model: "ModelConfig") -> dict[str, object]:
    """Returns the maximum request length if rotation or temperature depend on it, as in LongRoPE and Llama 4."""
    if not depends_on_length(model.hf_config):
        return {}
    chosen = {**(model.try_get_generation_config() or {}), **(model.override_generation_config or {})}
    return {"max_model_len": int(model.max_model_len), "generation": _digest_of(chosen)}


def depends_on_length(hf_config: Any) -> bool:
    """Returns whether the configuration, at any depth, has a setting that vLLM derives from ``max_model_len``."""

    def found(value: Any) -> bool:
        if isinstance(value, dict):
            kinds = {str(value.get(key, "")).lower() for key in ("rope_type", "type", "model_type")}
            return (
                bool(kinds & {"longrope", "su"})
                or any(kind.startswith("llama4") for kind in kinds)
                or "long_factor" in value
                or "attn_temperature_tuning" in value
                or any(found(inner) for inner in value.values())
            )
        return isinstance(value, (list, tuple)) and any(found(inner) for inner in value)

    return found(hf_config.to_dict())


def media_facts(model: "ModelConfig") -> dict[str, object]:
    """Returns what changes the embeddings of the same media: settings, and the files that configure the processor.

    vLLM's media hashes cover the media and the request's own ``mm_processor_kwargs``, not the engine's.
    """
    media = model.multimodal_config
    if media is None:
        return {}
    settings = {name: value for name in MEDIA_SETTINGS if (value := getattr(media, name))}
    files = _digests_of_files(model.model, model.revision, PROCESSOR_FILES)
    return {"media": _digest_of({"settings": settings, "files": files})}


def _digests_of_files(model: str, revision: str | None, names: tuple[str, ...]) -> dict[str, str]:
    """Returns the digest of each of these files of a model that is on this machine."""
    found = {}
    for name in names:
        place = local_directory(model, revision, name)
        with contextlib.suppress(OSError):
            if place is not None:
                found[name] = hashlib.sha256((place / name).read_bytes()).hexdigest()
    return found


def override_facts(model: "ModelConfig") -> dict[str, object]:
    """Returns the options that change how the same files become a model; nothing for an option that is not set.

    ``--quantization-config`` says which layers are quantised at load time, and how. Neither the weights' digest nor the
    model's configuration reflects it, and ``quantization`` only says ``online``.
    """
    options = {
        "quantization_config": model.quantization_config,
        "model_class_overrides": model.model_class_overrides,
    }
    return {name: spec_text(value) for name, value in options.items() if value}


def group_facts(engine: dict[str, object], group: Group, pages: GroupPages, rank: Rank, backend: str) -> str:
    """Returns the facts of one group's pages on one rank, as the JSON that ``Depot.open_namespace`` takes."""
    facts = {
        **engine,
        "backend": backend,
        "block_tokens": group.block_tokens,
        "layers": layer_ranges(pages.layer_names),
        "form": list(pages.forms),
        "spec": spec_text(group.spec),
        "kv_shards": rank.kv_shards,
        "kv_shard": rank.kv_shard,
        "dcp_rank": rank.dcp_rank,
    }
    return json.dumps(facts, sort_keys=True)


def slice_facts(
    engine: dict[str, object], group: Group, pages: GroupPages, slices: HeadSlices, number: int, backend: str
) -> str:
    """Returns the facts of one slice of a group's KV heads, which are equal on every rank of every engine."""
    facts = {
        **engine,
        "backend": backend,
        "block_tokens": group.block_tokens,
        "layers": layer_ranges(pages.layer_names),
        "form": list(pages.forms),
        "spec": spec_text(_of_all_heads(group.spec, slices.all_heads)),
        "kv_heads": slices.all_heads,
        "kv_slices": slices.count,
        "kv_slice": number,
    }
    return json.dumps(facts, sort_keys=True)


def _of_all_heads(spec: Any, heads: int) -> Any:
    """Returns a group's cache spec without the fields that differ between ranks."""
    inner = getattr(spec, "kv_cache_specs", None)
    if inner is not None:
        return [(name, _of_all_heads(one, heads)) for name, one in inner.items()]
    of_rank = {"num_kv_heads": heads, "page_size_padded": None, "max_tp_shards": None}
    return dataclasses.replace(spec, **{name: value for name, value in of_rank.items() if hasattr(spec, name)})


def of_version(facts: str, version: str) -> str:
    """Adds the version of weights replaced in memory to the facts; leaves them unchanged for the initial weights."""
    return json.dumps({**json.loads(facts), "weights_version": version}, sort_keys=True) if version else facts


def canonical_of_version(canonical: str, version: str) -> str:
    """The same as ``of_version`` for a namespace's complete description."""
    if not version:
        return canonical
    described = json.loads(canonical)
    described["facts"]["weights_version"] = version
    return json.dumps(described, sort_keys=True)


def spec_text(spec: Any) -> str:
    """Returns a cache spec or an option as text, or its digest if that is too long, as when it lists every layer."""
    text = re.sub(r"\s+", " ", repr(spec))
    if len(text) <= SPEC_TEXT_MAX:
        return text
    return f"{type(spec).__name__}:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def layer_ranges(names: Sequence[str]) -> list[str]:
    """Returns ``model.layers.{0-31}.attn`` for 32 layers: short, readable, unique for the layers and their order."""
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
    """Returns the digest of the model's configuration with the user's overrides, without its author and version."""
    values = {k: v for k, v in hf_config.to_dict().items() if k not in ("transformers_version", "_name_or_path")}
    return _digest_of(values)


def _digest_of(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=_as_text).encode()).hexdigest()[:32]


def _as_text(value: Any) -> str:
    """Returns an object as text that is the same in every process: without its address."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def hash_facts(vllm_config: "VllmConfig") -> str:
    """Returns how block hashes are computed: algorithm, seed, and the interpreter's version for pickled ones."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED")
    pickled = "" if algorithm.endswith("_cbor") else f"/py{sys.version_info[0]}.{sys.version_info[1]}"
    return f"{algorithm}{pickled}/{'default' if seed is None else hashlib.sha256(seed.encode()).hexdigest()[:8]}"


def unstable_hashes(vllm_config: "VllmConfig") -> str:
    """Returns why this engine's block hashes mean nothing to other processes, and what to do; empty if they do."""
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
    """Returns a name, or a path's last part, as paths differ between nodes; a digest identifies the files."""
    return os.path.basename(os.path.normpath(model)) if os.path.exists(model) else model


def draft_facts(vllm_config: "VllmConfig") -> dict[str, object]:
    """Returns the digest of a draft whose layers are in the same cache as the model's own; an empty one without layers.

    If nothing but a name is known of its weights, ``draft_model`` says so: then weights in memory count
    (``names_weights``).
    """
    speculative: Any = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    method = str(getattr(speculative, "method", None) or "")
    if draft is None or method in METHODS_WITHOUT_KV:
        return {"draft": ""}
    # An engine that was configured not to drop blocks also stores blocks that are valid for one continuation only.
    drops = getattr(speculative, "use_eagle_block_drop", None)
    volatile = "/volatile" if drops is not None and speculative.use_eagle() and not drops() else ""
    overrides = override_facts(draft)
    if draft.quantization and not getattr(draft.hf_config, "quantization_config", None):
        overrides["quantization"] = str(draft.quantization)
    suffix = f"/{_digest_of(overrides)}" if overrides else ""
    digest = _draft_weights(vllm_config, speculative, draft, method)
    facts: dict[str, object] = {"draft": f"{config_digest(draft.hf_config)}/{digest}{volatile}{suffix}"}
    if not digest:
        facts["draft_model"] = _model_name(str(getattr(speculative, "model", None) or draft.model))
    return facts


def _draft_weights(vllm_config: "VllmConfig", speculative: Any, draft: "ModelConfig", method: str) -> str:
    """Returns the digest of the draft's weight files; empty if its weights do not come from files that are here."""
    if method == "custom_class":  # the user's own code, whose model vLLM does not know
        return ""
    load_config = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    return _files_digest(draft, load_config.download_dir) if _load_format(load_config) in FILE_FORMATS else ""
