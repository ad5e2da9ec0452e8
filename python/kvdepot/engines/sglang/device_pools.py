"""The device pools of a model, as SGLang's linkers see them (0.5.23).

SGLang has a helper for hybrid models that refuses plain ones and sliding windows; those are put together here, from
its own classes.
"""

import importlib
from typing import Any

from kvdepot.errors import ConfigError

ASSEMBLER = "sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler"
HEADS, LATENT, WINDOWS = "MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool"
"""Classes of pools that are put together here; a subclass may have another layout."""
KV, SWA = "KV", "SWA"


def device_pool_group(cache: Any, params: Any, components: Any) -> Any:
    """Returns SGLang's ``DevicePoolGroup`` of a model.

    Args:
        cache: the model's KV cache.
        params: SGLang's ``CacheInitParams``.
        components: components of its tree.

    Raises:
        ConfigError: SGLang cannot hand out pages of this model's pools.
    """
    assembler = importlib.import_module(ASSEMBLER)
    kind = type(cache).__name__
    try:
        if kind in (HEADS, LATENT, WINDOWS):
            group = _plain(assembler, cache, params)
        else:
            group = assembler.resolve_hybrid_device_pool_group(
                kvcache=cache, page_size=params.page_size, params=params, components=components
            )
        for entry in group.entries:
            _refuse_layout(entry.device_pool)
    except ValueError as error:
        raise ConfigError(
            f"SGLang's linker does not support this model's pools ({kind}: {error}): use HiCache instead"
        ) from error
    return group


def _refuse_layout(pool: Any) -> None:
    layout = getattr(pool, "kv_cache_layout", None) or "nhd"
    if layout != "nhd":
        raise ValueError(f"their layout is {layout}, in which the rows of a tensor are not tokens")


def _plain(assembler: Any, cache: Any, params: Any) -> Any:
    if params.mtp_draft_device_pools or params.sidecar_draft_device_pools:
        raise ValueError("the KV of a draft model is in other pools")
    kind = type(cache).__name__
    if kind == WINDOWS:
        return _windows(assembler, cache, params.page_size)
    layers = {layer: layer for layer in range(cache.layer_num)}
    entry = _entry(assembler, KV, cache, layers, params.page_size)
    return assembler.DevicePoolGroup([entry], cache.layer_num, params.page_size, rank_replicated=kind == LATENT)


def _windows(assembler: Any, cache: Any, page_size: int) -> Any:
    """Returns the group of a model with full attention and sliding windows."""
    layers: dict[str, dict[int, int]] = {KV: {}, SWA: {}}
    for layer, (index, is_window) in cache.layers_mapping.items():
        layers[SWA if is_window else KV][layer - cache.start_layer] = index
    pools = {KV: cache.full_kv_pool, SWA: cache.swa_kv_pool}
    if any(type(pool).__name__ != HEADS for pool in pools.values()):
        raise ValueError(f"its pools are {[type(pool).__name__ for pool in pools.values()]}")
    entries = [_entry(assembler, name, pools[name], layers[name], page_size) for name in (KV, SWA) if layers[name]]
    return assembler.DevicePoolGroup(entries, max(map(max, filter(None, layers.values()))) + 1, page_size)


def _entry(assembler: Any, name: str, pool: Any, layers: dict[int, int], page_size: int) -> Any:
    """Returns the entry of a pool whose ``layers`` map the engine's layers to its tensors."""
    if getattr(pool, "k_scale_buffer", None) is not None or getattr(pool, "native_k_scale_buffer", None) is not None:
        raise ValueError("its KV has scales of its own")
    if type(pool).__name__ == LATENT:
        tensors = list(pool.kv_buffer)
        mapping: dict[int, tuple[int, ...]] = {layer: (index,) for layer, index in layers.items()}
    else:
        tensors = [*pool.k_buffer, *pool.v_buffer]
        mapping = {layer: (index, len(pool.k_buffer) + index) for layer, index in layers.items()}
    names = importlib.import_module("sglang.srt.mem_cache.hicache_storage").PoolName
    return assembler.DevicePoolEntry(
        name=names[name],
        indices_from_pool=names[name],
        device_pool=pool,
        components=[tensors],
        layer_mapping=mapping,
        page_size=page_size,
        rows_are_pages=False,
    )
