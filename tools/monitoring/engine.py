"""Serves the vLLM connector's series as vLLM's ``/metrics`` has them: ``python -m tools.monitoring.engine PORT``.

The series are made by the connector's own class. Its base, which is vLLM's, is replaced: vLLM is not needed. The counts
grow and are invented; a second's work is that of a small engine.
"""

import random
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

from prometheus_client import Counter, Gauge, Histogram, start_http_server

from tools.lab.ports import LOOPBACK

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector"
BLOCK_BYTES, BLOCK_TOKENS = 1 << 20, 16
STEP_S = 0.25


class Base:
    """What the connector's class takes from vLLM's: the classes of prometheus_client."""

    _counter_cls, _gauge_cls, _histogram_cls = Counter, Gauge, Histogram

    def __init__(self, *given: Any) -> None:
        pass


def stand_in(name: str, **members: Any) -> None:
    """Makes a module of vLLM's, and the packages around it."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        package = sys.modules.setdefault(".".join(parts[:count]), ModuleType(parts[count - 1]))
        package.__dict__.setdefault("__path__", [])
    package.__dict__.update(members)


def series() -> Any:
    """Returns the connector's series, for one engine."""
    factory = SimpleNamespace(register_connector=lambda *_: None)
    stand_in(f"{CONNECTORS}.factory", KVConnectorFactory=factory)
    stand_in(f"{CONNECTORS}.v1.metrics", KVConnectorPromMetrics=Base, KVConnectorStats=object)
    from kvdepot.engines.vllm.metrics import DepotPromMetrics

    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="", kv_connector_extra_config={}))
    names_of_labels, labels = ["model_name", "engine"], {0: ["model", "0"]}
    return DepotPromMetrics(config, {}, names_of_labels, labels)  # type: ignore[arg-type]


def counts(dice: random.Random) -> dict[str, Any]:
    """Returns what an engine may have counted in a step."""
    asked, pool, tier = 64, dice.randint(20, 40), dice.randint(0, 12)
    load_s, dump_s = dice.uniform(0.002, 0.04), dice.uniform(0.01, 0.08)
    return {
        "claims": 2,
        "asked_tokens": asked * BLOCK_TOKENS,
        "hit_tokens": {"pool": pool * BLOCK_TOKENS, "tier": tier * BLOCK_TOKENS},
        "lookup_seconds": [dice.uniform(0.0005, 0.004), dice.uniform(0.002, 0.02)],
        "loads": 1,
        "load_blocks": pool + tier,
        "load_bytes": (pool + tier) * BLOCK_BYTES,
        "load_seconds": [load_s],
        "dump_blocks": asked - pool - tier,
        "dump_bytes": (asked - pool - tier) * BLOCK_BYTES,
        "dump_seconds": [dump_s],
        "misses": {dice.choice(("unknown", "late", "slower")): 1},
        "attached": 1,
    }


def main() -> None:
    """Serves until it is killed."""
    made, dice = series(), random.Random(0)
    start_http_server(int(sys.argv[1]), LOOPBACK)
    pause = threading.Event()
    while not pause.wait(STEP_S):
        made.observe(counts(dice))


if __name__ == "__main__":
    main()
