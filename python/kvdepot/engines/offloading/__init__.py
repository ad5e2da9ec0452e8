"""kvdepot below vLLM's own offloading: the module that a secondary tier's ``module_path`` names, with ``KVDepotTier``.

vLLM imports it in its API server and its engine core. The import itself does nothing; the class is made on first use.
"""

from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdepot.engines.offloading.tier import KVDepotTier

__all__ = ["KVDepotTier"]


def __getattr__(name: str) -> "type[KVDepotTier]":
    if name != "KVDepotTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kvdepot.engines.offloading.tier import KVDepotTier
    except ImportError as e:
        if (e.name or "").partition(".")[0] != "vllm":
            raise
        raise ImportError(_unsuitable_vllm(e), name=e.name, path=e.path) from e
    return KVDepotTier


def _unsuitable_vllm(error: ImportError) -> str:
    try:
        found = f"vLLM {metadata.version('vllm')} has another one"
    except metadata.PackageNotFoundError:
        found = "vLLM is not installed in this environment"
    return (
        f"KVDepotTier needs the interface of secondary tiers that vLLM 0.32 has, and {found} ({error}): "
        "install vLLM 0.32, or use KVDepotConnector"
    )
