"""The facts of a namespace (P8): what changes the bytes of a page and is not in SGLang's hash of its tokens.

That hash covers tokens and, since 0.5.20, a request's adapter and salt. It covers neither the weights nor how their KV
is computed and laid out.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvdepot.engines.adapter_files import content_digest
from kvdepot.engines.sglang import engine
from kvdepot.engines.sglang.options import Options
from kvdepot.engines.sglang.pages import PoolPages
from kvdepot.engines.weights import (
    WEIGHT_SUFFIXES,
    config_file_digest,
    local_directory,
    model_digest,
    tree_digest,
    weights_digest,
)
from kvdepot.errors import ConfigError

FORMAT = 1
"""Incremented when the stored form of a page, or the hash of its key, changes."""

FILE_FORMATS = (
    "auto",
    "safetensors",
    "pt",
    "npcache",
    "fastsafetensors",
    "sharded_state",
    "gguf",
    "bitsandbytes",
    "mistral",
    "layered",
    "runai_streamer",
)
"""Load formats that read the weights from the model's own files."""

COMPUTE_ARGUMENTS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "modelopt_quant",
    "rl_quant_profile",
    "torchao_config",
    "model_impl",
    "context_length",
    "json_model_override_args",
    "mamba_ssm_dtype",
    "mm_process_config",
    "enable_deterministic_inference",
    "speculative_algorithm",
    "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_window_size",
)
"""Arguments of SGLang that change the content of KV; those that a release does not have are left out."""

EXPERT_ARGUMENTS = ("kt_method", "kt_num_gpu_experts", "kt_max_deferred_experts_per_token")
"""How KTransformers computes experts; meaningless without ``kt_weight_path``."""

GEOMETRY = (
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_group_num",
    "num_mamba_layers",
    "storage_format_tag",
    "conv_dtype",
    "temporal_dtype",
)
"""Attributes of pools that describe their tensors."""

SHARDED_POOLS = ("mamba",)
"""Pools that differ on every rank, even if the model's KV is the same on all of them."""


def engine_facts(options: Options) -> dict[str, object]:
    """Returns the facts shared by all pools and ranks of an engine.

    Raises:
        ConfigError: nothing distinguishes the weights from others, or this release's hashes leave out its adapters.
    """
    arguments = engine.server_arguments()
    facts: dict[str, object] = {
        "engine": "sglang",
        "sglang": engine.sglang_version(),
        "format": FORMAT,
        **_weights_facts(arguments, options),
        "attention": engine.attention_backends(arguments),
        "compute": {
            name: _text(getattr(arguments, name)) for name in COMPUTE_ARGUMENTS if getattr(arguments, name, None)
        },
        "salt": options.salt,
    }
    scales = getattr(arguments, "quantization_param_path", None)
    if scales:
        facts["scales"] = _file_digest(scales)
    experts = getattr(arguments, "kt_weight_path", None)
    if experts:
        facts["experts"] = {
            "weights": _experts_digest(str(experts), options),
            **{name: _text(getattr(arguments, name, "")) for name in EXPERT_ARGUMENTS},
        }
    draft = getattr(arguments, "speculative_draft_model_path", None)
    if draft:
        facts["draft"] = _digest_or_refuse(
            draft, getattr(arguments, "speculative_draft_model_revision", None), arguments, options, "draft model"
        )
    if adapters := _adapters(arguments):
        if not engine.hashes_know_adapters():
            raise ConfigError(
                f"SGLang {engine.sglang_version()} leaves a request's LoRA adapter out of its page hashes, so KV of "
                "one adapter would be served to another: take 0.5.20 or later, or start without adapters"
            )
        facts["adapters"] = adapters
    return facts


def pool_facts(facts: Mapping[str, object], name: str, pages: PoolPages, storage: Any) -> dict[str, object]:
    """Returns the facts of the pages of one pool on this rank.

    Args:
        facts: facts of the engine.
        name: SGLang's name of the pool.
        pages: its pages.
        storage: SGLang's ``HiCacheStorageConfig``, or a linker's ranks. A field that a release does not have
            defaults to a single rank.
    """
    pool = pages.pool
    replicated = bool(getattr(storage, "is_mla_model", False)) and not _is_sharded(name, pool)
    return {
        **facts,
        "pool": name,
        "class": type(pool).__name__,
        "form": pages.form,
        "page_tokens": pages.page_tokens,
        "dtype": str(getattr(pool, "dtype", "")).removeprefix("torch."),
        "geometry": {name: _text(getattr(pool, name)) for name in GEOMETRY if getattr(pool, name, None) is not None},
        # Ranks with the same KV read what one of them has written. So do data-parallel replicas.
        "tp": [0, 1] if replicated else _rank(storage, "tp"),
        "pp": _rank(storage, "pp"),
        "cp": _rank(storage, "attn_cp"),
        "dcp": _rank(storage, "dcp"),
    }


def refuse_unsupported(storage: Any) -> None:
    """Rejects settings under which pages would be stored in pieces that no rank reads completely.

    Raises:
        ConfigError: heads are to be split between ranks (``tp_lcm_size``).
    """
    if getattr(storage, "should_split_heads", False) or getattr(storage, "tp_lcm_size", None):
        raise ConfigError("tp_lcm_size: kvdepot stores the pages of a rank whole: remove it")


def refuse_pool(name: str, pool: Any, storage: Any) -> None:
    """Rejects a pool whose pages are looked up on ranks where SGLang never writes them: no hit would ever be complete.

    Raises:
        ConfigError: a pool with heads beside latent attention, which only rank 0 writes, and several ranks.
    """
    if getattr(storage, "is_mla_model", False) and _rank(storage, "tp")[1] > 1 and _has_heads(pool):
        raise ConfigError(
            f"pool {name}: of a model with latent attention SGLang writes rank 0's pages alone, and this pool's heads "
            "differ between ranks, so nothing would be a hit: start with --tp-size 1, or with a draft model that has "
            "latent attention, too"
        )


def _weights_facts(arguments: Any, options: Options) -> dict[str, object]:
    """Returns the facts of the weights in memory.

    Raises:
        ConfigError: nothing distinguishes them from others.
    """
    model, version = engine.model_path(arguments), engine.weight_version(arguments)
    if version != engine.weight_version_of_start(arguments) and not options.weights_version:
        # They may be a trainer's, of which no file knows. Another training run counts its versions in the same way.
        raise ConfigError(
            f"the weights were updated in place, to weight_version {version!r}, which another training run may have: "
            "set weights_version in the extra config to a name that no other run has"
        )
    return {
        "weights": _digest_or_refuse(model, getattr(arguments, "revision", None), arguments, options, "model"),
        "weights_version": options.weights_version,
        "weight_version": version,
        "model_config": config_file_digest(model, getattr(arguments, "revision", None)),
    }


def _digest_or_refuse(model: str, revision: str | None, arguments: Any, options: Options, what: str) -> str:
    """Returns the digest of a model's files, or the model's name if the user has named the weights.

    Raises:
        ConfigError: there are no readable files, or other weights are loaded, and ``weights_version`` is not set.
    """
    load_format = getattr(arguments, "load_format", None) or "auto"
    load_format = str(getattr(load_format, "value", load_format)).lower()
    if load_format in FILE_FORMATS:
        if digest := model_digest(str(model), revision, getattr(arguments, "download_dir", None)):
            return digest
        why = "no files of its weights are found on this machine"
    else:
        why = f"--load-format {load_format} takes its weights from elsewhere"
    if options.weights_version:
        return f"{model}@{revision or ''}/{load_format}"
    raise ConfigError(
        f"{what} {model}: {why}, so its KV cannot be distinguished from another model's: set weights_version in the "
        "extra config to a name that no other weights have"
    )


def _experts_digest(path: str, options: Options) -> str:
    """Returns the digest of the experts' weights, which KTransformers reads from files of its own.

    Raises:
        ConfigError: the files are missing or unreadable, and ``weights_version`` is not set.
    """
    why = "no files are there"
    try:
        if digest := tree_digest(Path(path)):
            return digest
    except OSError as error:
        why = f"cannot be read: {error}"
    if options.weights_version:
        return f"{path}@{options.weights_version}"
    raise ConfigError(
        f"--kt-weight-path {path}: {why}, so KV of its experts cannot be distinguished from that of others: set "
        "weights_version in the extra config to a name that no other weights have"
    )


def _adapters(arguments: Any) -> dict[str, str]:
    """Returns the adapters given at the start by name, each with the digest of its files; with LoRA at least one entry.

    SGLang's hashes identify such an adapter by its name and path alone. An adapter loaded later has a name of its own
    in every process, so its KV is found by that process only.
    """
    if not (getattr(arguments, "enable_lora", None) or getattr(arguments, "lora_paths", None)):
        return {}
    found = {"": "on"}
    for name, path in _named_paths(getattr(arguments, "lora_paths", None) or ()):
        directory = local_directory(path, None, "adapter_config.json")
        try:
            # All files, including its configuration: SGLang scales by its values (`lora_alpha / r`).
            digest = content_digest(directory, WEIGHT_SUFFIXES) if directory and weights_digest(directory) else b""
        except OSError as error:
            raise ConfigError(f"adapter {name}: {path}: cannot be read: {error}") from error
        if not digest:
            raise ConfigError(f"adapter {name}: {path}: no files of it on this machine, so its KV cannot be named")
        found[name] = digest.hex()[:32]
    return found


def _named_paths(adapters: Any) -> Iterable[tuple[str, str]]:
    """Yields names and paths of ``--lora-paths``, in each of its forms."""
    for one in adapters.items() if isinstance(adapters, Mapping) else adapters:
        if isinstance(one, str):
            name, _, path = one.rpartition("=")
        elif isinstance(one, tuple):
            name, path = one
        elif isinstance(one, Mapping):
            name, path = one["lora_name"], one["lora_path"]
        else:
            name, path = one.lora_name, one.lora_path
        yield str(name or path), str(path)


def _is_sharded(name: str, pool: Any) -> bool:
    """Returns whether a pool differs by rank even if the model's KV does not: state, and drafts with heads."""
    return name in SHARDED_POOLS or _has_heads(pool)


def _has_heads(pool: Any) -> bool:
    return any("MHA" in kind.__name__ for kind in type(pool).__mro__)


def _rank(storage: Any, kind: str) -> list[int]:
    return [int(getattr(storage, f"{kind}_rank", 0) or 0), int(getattr(storage, f"{kind}_size", 1) or 1)]


def _text(value: object) -> str:
    return str(getattr(value, "value", value))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _file_digest(path: str) -> str:
    """Returns the digest of a file of scales.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return _digest(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"quantization_param_path: {path}: cannot be read: {error}") from error
