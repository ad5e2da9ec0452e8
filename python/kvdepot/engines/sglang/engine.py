"""State of the running SGLang in each release: arguments, version, and what its page hashes leave out."""

import importlib
import importlib.metadata
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvdepot.errors import ConfigError


def sglang_version() -> str:
    """Returns the version of the installed SGLang.

    Raises:
        ConfigError: SGLang has no metadata.
    """
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError("SGLang's version is unknown, so its pages cannot be named: install its wheel") from error


def server_arguments() -> Any:
    """Returns the arguments that SGLang was started with.

    Raises:
        ConfigError: it is unknown where this release keeps them.
    """
    # Since 0.5.15, and before it.
    for module, function in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),
    ):
        found = _call(module, function)
        if found is not None:
            return found
    raise ConfigError(f"SGLang {sglang_version()} does not report its arguments, so its model is unknown")


def attention_backends(arguments: Any) -> list[str]:
    """Returns the attention backends that SGLang has chosen, or the requested ones if it does not report its choice."""
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    kernel = getattr(_call("sglang.srt.runtime_context", "get_exec"), "kernel", None)
    return [str(getattr(kernel, name, None) or getattr(arguments, name, None) or "") for name in names]


def model_path(arguments: Any) -> str:
    """Returns where the weights in memory come from: an in-place update may have loaded others than the start."""
    model = _call("sglang.srt.runtime_context", "get_model")
    return str(getattr(model, "model_path", None) or arguments.model_path)


def current_weights(arguments: Any) -> str:
    """Returns path and version of the weights that SGLang was last given, at its start or by an in-place update."""
    serving = _call("sglang.srt.runtime_context", "get_serving")
    version = getattr(serving, "weight_version", None) or getattr(arguments, "weight_version", None)
    return f"{model_path(arguments)} {version or ''}".strip()


def weight_version(arguments: Any) -> str:
    """Returns only the version."""
    return current_weights(arguments).removeprefix(model_path(arguments)).strip()


def weight_version_of_start(arguments: Any) -> str:
    """Returns the version that SGLang was started with (``--weight-version``): no update changes its arguments."""
    return str(getattr(arguments, "weight_version", None) or "")


def ranks_of_node(arguments: Any, storage: Any) -> int:
    """Returns the maximum number of ranks of this engine on a node, including its data-parallel replicas."""

    def size(source: Any, name: str) -> int:
        return max(1, int(getattr(source, name, None) or 1))

    replicas = 1 if getattr(arguments, "enable_dp_attention", False) else size(arguments, "dp_size")
    stored = size(storage, "tp_size") * size(storage, "pp_size") * size(storage, "attn_cp_size")
    ranks = max(size(arguments, "tp_size") * size(arguments, "pp_size"), stored) * replicas
    return -(-ranks // size(arguments, "nnodes"))


def linker_ranks(params: Any, *, replicated: bool) -> SimpleNamespace:
    """Returns a linker's ranks, with the names that ``HiCacheStorageConfig`` gives to those of a storage backend.

    Args:
        params: SGLang's ``CacheInitParams``.
        replicated: whether all tensor-parallel ranks have the same KV.
    """
    parallel = _call("sglang.srt.runtime_context", "get_parallel")
    rank, size = 0, int(getattr(parallel, "tp_size", 1) or 1)
    distributed = importlib.import_module("torch.distributed")
    if distributed.is_available() and distributed.is_initialized():
        # With attention parallelised by data, the ranks that share a prefix are fewer than those of the model.
        group = params.attn_tp_cache_group or params.tp_cache_group
        rank, size = distributed.get_rank(group=group), distributed.get_world_size(group=group)
    return SimpleNamespace(
        tp_rank=rank,
        tp_size=size,
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        attn_cp_rank=params.attn_cp_rank,
        attn_cp_size=params.attn_cp_size,
        dcp_size=int(getattr(parallel, "attn_dcp_size", 1) or 1),
        is_mla_model=replicated,
    )


def hashes_know_adapters() -> bool:
    """Returns whether page hashes include a request's adapter and salt: since 0.5.20."""
    try:
        utils = importlib.import_module("sglang.srt.mem_cache.utils")
    except ImportError:
        return False
    return hasattr(utils, "storage_namespace_seed")


def _call(module: str, function: str) -> Any:
    """Returns the result of one of SGLang's functions; ``None`` if the function does not exist or has no answer yet."""
    try:
        found: Callable[[], Any] | None = getattr(importlib.import_module(module), function, None)
        return found() if found is not None else None
    except Exception:  # noqa: BLE001 - a release that has removed it, or a process that is not a scheduler
        return None
