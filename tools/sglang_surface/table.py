"""Makes the table of one release of SGLang.

The faces get most of SGLang's objects as arguments of any type, so that a table has more than definitions:

``calls``
    how SGLang calls a face's methods: the number of positional arguments, and the names of the others.
``names``, ``definitions``
    as in vLLM's tables, with the names of ``HICACHE_NEEDS`` and ``LINKER_NEEDS`` and those that ``OPTIONAL`` lists.
``values``
    of the members of SGLang's enumerations that the faces compare with.
``arguments``
    of SGLang's command line that are part of a namespace.
``attributes``
    names of objects of SGLang's that the faces look for with a default.
"""

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from tools.vllm_surface.sources import Release
from tools.vllm_surface.table import Table, table_of
from tools.vllm_surface.used import ENGINES, ROOT, Used, used_names

__all__ = ["ROOT", "table_of_sglang"]

FACES = ENGINES / "sglang"
CALLERS = ("sglang/srt/managers/", "sglang/srt/mem_cache/")
STORES = "sglang/srt/mem_cache/storage/"
"""Other backends and linkers are below it, which call each other."""
FACTORIES = {"_create_dynamic_backend": "hicache", "create_unified_cache_linker": "linker"}
"""Functions that make a face, whose class is a variable there."""
RECEIVERS = {"storage_backend": "hicache", "cache_linker": "linker"}
"""Names of variables and attributes that are a face."""
ENUMS = ("PoolName", "PoolHitPolicy")
VALUES = ("KV", "SWA", "MAMBA", "ALL_PAGES", "TRAILING_PAGES")
ARGUMENTS = ("COMPUTE_ARGUMENTS", "EXPERT_ARGUMENTS")
"""Tuples in ``facts.py``."""
SECTIONS = ("sglang/srt/runtime_context.py", "sglang/srt/arg_groups/fields/")
"""Where later releases name the sections of their arguments in strings."""

STORAGE = "sglang.srt.mem_cache.hicache_storage"
LINKER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"
POOLS = "sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler"
CACHE = "sglang.srt.mem_cache.cache_init_params:CacheInitParams"

HICACHE_NEEDS = (
    f"{STORAGE}:HiCacheStorage.register_mem_pool_host",
    f"{STORAGE}:HiCacheStorageConfig.extra_config",
    f"{STORAGE}:HiCacheStorageConfig.is_mla_model",
    f"{STORAGE}:HiCacheStorageConfig.pp_rank",
    f"{STORAGE}:HiCacheStorageConfig.pp_size",
    f"{STORAGE}:HiCacheStorageConfig.tp_rank",
    f"{STORAGE}:HiCacheStorageConfig.tp_size",
)
"""What the HiCache face cannot do without, as ``module:class.member``."""

HYBRID_NEEDS = (
    f"{STORAGE}:HiCacheStorage.register_mem_host_pool_v2",
    f"{STORAGE}:PoolTransfer.hit_policy",
    f"{STORAGE}:PoolTransfer.host_indices",
    f"{STORAGE}:PoolTransfer.keys",
    f"{STORAGE}:PoolTransfer.name",
    f"{STORAGE}:PoolTransferResult.extra_pool_hit_pages",
    f"{STORAGE}:PoolTransferResult.kv_hit_pages",
)
"""What it needs for models with several pools."""

LINKER_NEEDS = (
    *HYBRID_NEEDS,
    *(f"{CACHE}.{name}" for name in ("page_size", "token_to_kv_pool_allocator", "req_to_token_pool")),
    *(f"{CACHE}.{name}" for name in ("attn_tp_cache_group", "tp_cache_group", "pp_rank", "pp_size")),
    *(f"{CACHE}.{name}" for name in ("attn_cp_rank", "attn_cp_size")),
    *(f"{CACHE}.{name}" for name in ("mtp_draft_device_pools", "sidecar_draft_device_pools")),
    *(f"{LINKER}:LayerWiseLoadCounter.{name}" for name in ("update_producer", "complete", "fail", "finish", "reset")),
    f"{LINKER}:UnifiedCacheLinker.record_offload_ready",
    *(f"{POOLS}:DevicePoolEntry.{name}" for name in ("buffer_meta", "components", "device_pool", "kv_buffer")),
    *(f"{POOLS}:DevicePoolEntry.{name}" for name in ("layer_mapping", "page_size", "prepare_locations")),
    *(f"{POOLS}:DevicePoolGroup.{name}" for name in ("entries", "entry_map", "num_layers", "rank_replicated")),
    f"{POOLS}:DevicePoolGroup.resolve_transfers",
    f"{POOLS}:resolve_hybrid_device_pool_group",
)
"""What the linker cannot do without."""

OPTIONAL = (
    "sglang.srt.mem_cache.utils:storage_namespace_seed",
    "sglang.srt.observability.metrics_collector:StorageMetrics.backup_bandwidth",
    "sglang.srt.observability.metrics_collector:StorageMetrics.backup_pgs",
    "sglang.srt.observability.metrics_collector:StorageMetrics.prefetch_bandwidth",
    "sglang.srt.observability.metrics_collector:StorageMetrics.prefetch_pgs",
    *(f"sglang.srt.runtime_context:get_{name}" for name in ("exec", "model", "parallel", "server_args", "serving")),
    "sglang.srt.server_args:get_global_server_args",
)
"""What only some releases have; ``engine.py`` asks for it with a default."""


def table_of_sglang(release: Release, version: str) -> Table:
    """Returns the table of a release."""
    calls = {face: dict(sorted(methods.items())) for face, methods in _calls(release).items()}
    used = used_by_faces({method for methods in calls.values() for method in methods})
    table = table_of(release, version, used)
    mine = release.module(STORAGE)
    values = {}
    for name in ENUMS:
        node = mine.definitions.get(name) if mine is not None else None
        for one in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) in VALUES:
                values[f"{name}.{ast.unparse(one.targets[0])}"] = ast.literal_eval(one.value)
    arguments = {name for entry in ARGUMENTS for name in facts_tuple(entry)}
    held = set(used.probes) | set(facts_tuple("GEOMETRY"))
    return {
        **table,
        "calls": calls,
        "values": values,
        "arguments": sorted(arguments & _arguments(release)),
        "attributes": sorted(held & (_attributes(release) | _arguments(release))),
    }


def facts_tuple(name: str) -> tuple[str, ...]:
    """Returns a tuple of ``facts.py``."""
    for node in ast.parse((FACES / "facts.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            found: tuple[str, ...] = ast.literal_eval(node.value)
            return found
    raise ValueError(f"facts.py has no {name}")


def used_by_faces(called: Iterable[str] = ()) -> Used:
    """Returns what the faces use of SGLang, with the methods that it calls on them."""
    found = used_names(FACES, package="sglang")
    found.mentioned.update(called)
    for entry in (*HICACHE_NEEDS, *LINKER_NEEDS, *OPTIONAL):
        module, _, path = entry.partition(":")
        owner, _, member = path.partition(".")
        found.imports.setdefault(module, set()).add(owner)
        found.mentioned.add(member)
    return found


def _calls(release: Release) -> dict[str, dict[str, list[dict[str, Any]]]]:
    found: dict[str, dict[str, list[dict[str, Any]]]] = {"hicache": {}, "linker": {}}
    for name, tree in release.trees(*CALLERS):
        if name.startswith(STORES) and not name.endswith("/backend_factory.py"):
            continue
        for face, method, call in _calls_in(tree):
            keywords = sorted(one.arg for one in call.keywords if one.arg)
            how = {"positional": len(call.args), "keywords": keywords}
            known = found[face].setdefault(method, [])
            if how not in known:
                known.append(how)
                known.sort(key=str)
    return found


def _calls_in(tree: ast.Module) -> Iterator[tuple[str, str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            receiver = ast.unparse(node.func.value).rpartition(".")[2]
            if receiver in RECEIVERS:
                yield RECEIVERS[receiver], node.func.attr, node
        elif isinstance(node, ast.FunctionDef) and node.name in FACTORIES:
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in ("backend_class", "linker_cls"):
                    yield FACTORIES[node.name], "__init__", call


def _arguments(release: Release) -> set[str]:
    """Returns the names of SGLang's arguments, which later releases keep in several classes."""
    trees = release.trees("sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/")
    fields = (node for _, tree in trees for node in ast.walk(tree) if isinstance(node, ast.AnnAssign))
    return {node.target.id for node in fields if isinstance(node.target, ast.Name)}


def _attributes(release: Release) -> set[str]:
    found = set()
    for file, tree in release.trees("sglang/srt/mem_cache/", *SECTIONS):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and file.startswith(SECTIONS):
                found.update(node.value.split("."))
    return found
