"""The connector's own logic, without an engine: where vLLM is not installed, its base classes are stood in for."""

import importlib.util
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass
class StatsBase:
    data: dict[str, Any] = field(default_factory=dict)


def _stand_in(name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    module.__path__ = []  # type: ignore[attr-defined]
    sys.modules[name] = module


if importlib.util.find_spec("vllm") is None:
    for package in ("vllm", "vllm.distributed", "vllm.distributed.kv_transfer"):
        _stand_in(package)
    _stand_in("vllm.distributed.kv_transfer.kv_connector")
    _stand_in("vllm.distributed.kv_transfer.kv_connector.v1")
    empty = {name: type(name, (), {}) for name in ("KVConnectorBase_V1", "KVConnectorRole", "SupportsHMA")}
    messages = ("KVConnectorMetadata", "KVConnectorWorkerMetadata", "KVConnectorHandshakeMetadata")
    _stand_in(
        "vllm.distributed.kv_transfer.kv_connector.v1.base", **empty, **{name: type(name, (), {}) for name in messages}
    )
    _stand_in("vllm.distributed.kv_transfer.kv_connector.v1.metrics", KVConnectorStats=StatsBase)
