"""kvdepot below vLLM's own offloading: the module that a secondary tier's ``module_path`` names, with ``KVDepotTier``.

vLLM imports it in its API server and its engine core. The import itself does nothing; the class is made on first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdepot.engines.offloading.tier import KVDepotTier

__all__ = ["KVDepotTier"]


def __getattr__(name: str) -> "type[KVDepotTier]":
    if name != "KVDepotTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvdepot.engines.offloading.tier import KVDepotTier

    return KVDepotTier
