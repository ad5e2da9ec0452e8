"""kvdepot stores the KV caches of LLM engines: dump a computed KV cache, load it back instead of recomputing it.

``kvdepot.open`` returns a ``Store``, ``kvdepot.config`` reads configurations, ``kvdepot.errors`` lists the exceptions.
Names are imported on first use, so ``import kvdepot.config`` needs neither numpy nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdepot._native import __version__
    from kvdepot.config import KVDepotConfig, load_config
    from kvdepot.errors import (
        BlockNotFoundError,
        BusyError,
        ConfigError,
        CorruptError,
        DepotTimeoutError,
        KVDepotError,
        NoSpaceError,
        ProtocolError,
        StorageError,
        UnavailableError,
        UnsupportedError,
    )
    from kvdepot.layout import BlockLayout
    from kvdepot.store import Store
    from kvdepot.store import open_store as open  # noqa: A004 - users read it as kvdepot.open
    from kvdepot.task import Task, TaskResult

__all__ = [
    "BlockLayout",
    "BlockNotFoundError",
    "BusyError",
    "ConfigError",
    "CorruptError",
    "DepotTimeoutError",
    "KVDepotConfig",
    "KVDepotError",
    "NoSpaceError",
    "ProtocolError",
    "StorageError",
    "Store",
    "Task",
    "TaskResult",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
    "load_config",
    "open",
]

_HOMES = {
    "BlockLayout": "kvdepot.layout",
    "KVDepotConfig": "kvdepot.config",
    "Store": "kvdepot.store",
    "Task": "kvdepot.task",
    "TaskResult": "kvdepot.task",
    "__version__": "kvdepot._native",
    "load_config": "kvdepot.config",
    "open": "kvdepot.store",
}
_NAMES_THERE = {"open": "open_store"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(_HOMES.get(name, "kvdepot.errors"))
    value = getattr(home, _NAMES_THERE.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
