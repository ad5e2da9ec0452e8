"""kvdepot stores the KV caches of LLM engines: dump a computed KV cache, load it back instead of recomputing it.

``kvdepot.open`` returns a ``Store`` for one namespace, ``kvdepot.attach`` a ``Depot`` for many. ``kvdepot.config``
reads configurations, ``kvdepot.errors`` lists the exceptions. Names are imported on first use, so
``import kvdepot.config`` needs neither numpy nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdepot._native import __version__
    from kvdepot.absence import tell_if_absent
    from kvdepot.claim import Arriving, Claim, ClaimTimes, Group, Hit, TierReads
    from kvdepot.config import KVDepotConfig, load_config, load_engine_config
    from kvdepot.depot import Depot, attach
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
        is_failure,
    )
    from kvdepot.follower import Change, Follower
    from kvdepot.hashes import block_hash
    from kvdepot.layout import BlockLayout
    from kvdepot.namespace import Namespace
    from kvdepot.store import Store
    from kvdepot.task import Task, TaskResult

__all__ = [
    "Arriving",
    "BlockLayout",
    "BlockNotFoundError",
    "BusyError",
    "Change",
    "Claim",
    "ClaimTimes",
    "ConfigError",
    "CorruptError",
    "Depot",
    "DepotTimeoutError",
    "Follower",
    "Group",
    "Hit",
    "KVDepotConfig",
    "KVDepotError",
    "Namespace",
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
    "block_hash",
    "is_failure",
    "load_config",
    "load_engine_config",
    "open",
    "tell_if_absent",
]

_HOMES = {
    "Arriving": "kvdepot.claim",
    "BlockLayout": "kvdepot.layout",
    "Change": "kvdepot.follower",
    "Claim": "kvdepot.claim",
    "ClaimTimes": "kvdepot.claim",
    "Depot": "kvdepot.depot",
    "Follower": "kvdepot.follower",
    "Group": "kvdepot.claim",
    "Hit": "kvdepot.claim",
    "KVDepotConfig": "kvdepot.config",
    "Namespace": "kvdepot.namespace",
    "Store": "kvdepot.store",
    "Task": "kvdepot.task",
    "TaskResult": "kvdepot.task",
    "TierReads": "kvdepot.claim",
    "__version__": "kvdepot._native",
    "attach": "kvdepot.depot",
    "block_hash": "kvdepot.hashes",
    "load_config": "kvdepot.config",
    "load_engine_config": "kvdepot.config",
    "open": "kvdepot.depot",
    "tell_if_absent": "kvdepot.absence",
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
