"""kvdepot stores the KV caches of LLM engines: dump a computed KV cache, load it back instead of recomputing it.

``kvdepot.open`` returns a ``Store`` for one namespace, ``kvdepot.attach`` a ``Depot`` for many. ``kvdepot.config``
reads configurations, ``kvdepot.errors`` lists the exceptions. Names are imported on first use, so
``import kvdepot.config`` needs neither numpy nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdepot._native import __version__
    from kvdepot.config import KVDepotConfig, load_config
    from kvdepot.depot import Claim, ClaimTimes, Depot, Group, Hit, TierReads, attach
    from kvdepot.depot import open_store as open  # noqa: A004 - users read it as kvdepot.open
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
    from kvdepot.task import Task, TaskResult

__all__ = [
    "BlockLayout",
    "BlockNotFoundError",
    "BusyError",
    "Claim",
    "ClaimTimes",
    "ConfigError",
    "CorruptError",
    "Depot",
    "DepotTimeoutError",
    "Group",
    "Hit",
    "KVDepotConfig",
    "KVDepotError",
    "NoSpaceError",
    "ProtocolError",
    "StorageError",
    "Store",
    "Task",
    "TaskResult",
    "TierReads",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
    "attach",
    "load_config",
    "open",
]

_HOMES = {
    "BlockLayout": "kvdepot.layout",
    "Claim": "kvdepot.depot",
    "ClaimTimes": "kvdepot.depot",
    "Depot": "kvdepot.depot",
    "Group": "kvdepot.depot",
    "Hit": "kvdepot.depot",
    "KVDepotConfig": "kvdepot.config",
    "Store": "kvdepot.store",
    "Task": "kvdepot.task",
    "TaskResult": "kvdepot.task",
    "TierReads": "kvdepot.depot",
    "__version__": "kvdepot._native",
    "attach": "kvdepot.depot",
    "load_config": "kvdepot.config",
    "open": "kvdepot.depot",
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
