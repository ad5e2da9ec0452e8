"""kvdepot in SGLang: ``KVDepotHiCache`` is a storage backend of HiCache, ``KVDepotLinker`` an external linker.

Importing this module imports neither SGLang nor torch; each class is created on first access.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdepot.engines.sglang.backend import KVDepotHiCache
    from kvdepot.engines.sglang.linker import KVDepotLinker

__all__ = ["KVDepotHiCache", "KVDepotLinker"]

_MODULES = {"KVDepotHiCache": "backend", "KVDepotLinker": "linker"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
