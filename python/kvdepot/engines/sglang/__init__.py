"""kvdepot in SGLang: the module for ``--hicache-storage-backend-extra-config``, with ``KVDepotHiCache``.

Importing it imports neither SGLang nor torch; the class is created on first access.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdepot.engines.sglang.backend import KVDepotHiCache

__all__ = ["KVDepotHiCache"]


def __getattr__(name: str) -> "type[KVDepotHiCache]":
    if name != "KVDepotHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvdepot.engines.sglang.backend import KVDepotHiCache

    return KVDepotHiCache
