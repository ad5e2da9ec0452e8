"""Counters of the connector for vLLM's log line and Prometheus: plain sums, so that ranks and steps just add up."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


@dataclass
class DepotStats(KVConnectorStats):
    """Sums by name: ``loads``, ``load_blocks``, ``load_bytes``, ``dump_blocks``, ``load_failed_<kind>`` and so on."""

    def add(self, name: str, amount: int = 1) -> None:
        """Counts ``amount`` of ``name``."""
        if amount:
            self.data[name] = self.data.get(name, 0) + amount

    def add_failures(self, verb: str, failures: Mapping[str, int]) -> None:
        """Counts blocks that failed, by kind of failure."""
        for kind, count in failures.items():
            self.add(f"{verb}_failed_{kind}", count)

    def reset(self) -> None:
        """Forgets all."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "DepotStats":
        """The sum of both."""
        total = DepotStats(data=dict(self.data))
        for name, amount in other.data.items():
            total.add(name, amount)
        return total

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log line shows."""
        return {name.replace("_", " "): self.data[name] for name in sorted(self.data)}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def take(self) -> "DepotStats | None":
        """What was counted since the last call; None when nothing was."""
        if not self.data:
            return None
        taken, self.data = DepotStats(data=self.data), {}
        return taken


def stats_from(data: dict[str, Any] | None) -> DepotStats:
    """The stats object of a payload that came from another process."""
    return DepotStats(data=dict(data or {}))
