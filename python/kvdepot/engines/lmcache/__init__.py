"""kvdepot in LMCache: the module for LMCache's configuration, with classes for both of its interfaces.

``KVDepotL2Adapter`` is an L2 adapter of LMCache's server (``--l2-adapter`` of type ``plugin``), ``KVDepotBackend`` a
storage plug-in of LMCache inside the engine (``storage_plugins``). Importing this module imports neither LMCache nor
torch; a class is created on first access.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdepot.engines.lmcache.adapter import KVDepotL2Adapter
    from kvdepot.engines.lmcache.backend import KVDepotBackend

__all__ = ["KVDepotBackend", "KVDepotL2Adapter"]

_HOMES = {"KVDepotBackend": "backend", "KVDepotL2Adapter": "adapter"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
