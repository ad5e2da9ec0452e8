"""The connector's counts between two reports, for vLLM's log line and Prometheus."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvdepot.engines.vllm.measures import MEASURES, Kind, Measure, Over


@dataclass
class DepotStats(KVConnectorStats):
    """Values by the name of their measure: a number, numbers by label, or a list of observations.

    Attributes:
        first_rank: whether this process reports what all ranks count alike; true in the scheduler.
        first_slice: whether it reports its share of work that ranks with the same bytes divide among them; true in the
            scheduler.
    """

    first_rank: bool = True
    first_slice: bool = True

    def add(self, name: str, amount: int = 1, label: str = "") -> None:
        """Adds ``amount`` to a measure, under a label if it has one.

        Raises:
            KeyError: there is no such measure.
        """
        measure = MEASURES[name]
        if not amount:
            return
        if measure.label:
            by_label = self.data.setdefault(name, {})
            by_label[label] = by_label.get(label, 0) + amount
        else:
            self.data[name] = self.data.get(name, 0) + amount

    def add_failures(self, verb: str, failures: Mapping[str, int]) -> None:
        """Counts blocks that failed, by kind of failure."""
        for kind, count in failures.items():
            self.add(f"{verb}_failed_blocks", count, kind)

    def add_hit(self, tokens: int, from_tier: int) -> None:
        """Counts the tokens of a hit, ``from_tier`` of which came from below the pool."""
        self.add("hit_tokens", tokens - from_tier, "pool")
        self.add("hit_tokens", from_tier, "tier")

    def add_transfer(self, verb: str, blocks: int, block_bytes: int, seconds: float) -> None:
        """Counts a load or a dump that has ended, and the blocks that it copied."""
        self.observe(f"{verb}_seconds", seconds)
        self.add(f"{verb}_blocks", blocks)
        self.add(f"{verb}_bytes", blocks * block_bytes)
        if blocks:
            self.observe(f"{verb}_size_blocks", blocks)
            self.observe(f"{verb}_bytes_per_second", blocks * block_bytes / max(seconds, 1e-9))

    def observe(self, name: str, value: float) -> None:
        """Adds an observation to a histogram. Raises ``KeyError`` for another kind of measure."""
        if MEASURES[name].kind is not Kind.HISTOGRAM:
            raise KeyError(name)
        self.data.setdefault(name, []).append(value)

    def tell(self, name: str, value: int) -> None:
        """Sets a gauge. Raises ``KeyError`` for another kind of measure."""
        if MEASURES[name].kind is not Kind.GAUGE:
            raise KeyError(name)
        self.data[name] = value

    def reset(self) -> None:
        """Drops all counts."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> "DepotStats":
        """Adds the counts of another rank, or of a later step."""
        together = dict(self.data)
        for name, value in known(other.data).items():
            together[name] = _together(MEASURES[name].kind, together[name], value) if name in together else value
        return DepotStats(data=together)

    def reduce(self) -> dict[str, int | float]:
        """Returns the values for vLLM's log line."""
        shown: dict[str, int | float] = {}
        for name in sorted(self.data):
            value, words = self.data[name], name.replace("_", " ")
            if isinstance(value, dict):
                shown.update({f"{words} {label}": value[label] for label in sorted(value)})
            elif isinstance(value, list):
                shown[f"{words} mean"] = round(sum(value) / len(value), 4)
                shown[f"{words} max"] = round(max(value), 4)
            else:
                shown[words] = value
        return shown

    def is_empty(self) -> bool:
        """Returns whether nothing was counted."""
        return not self.data

    def take(self) -> "DepotStats | None":
        """Returns what was counted since the last call, for the engine's sum; None if nothing was."""
        taken, self.data = self.data, {}
        left_out = {Over.FIRST: not self.first_rank, Over.SHARED: not self.first_slice}
        taken = {name: value for name, value in taken.items() if not left_out.get(MEASURES[name].over)}
        return DepotStats(data=taken) if taken else None


def _together(kind: Kind, one: Any, other: Any) -> Any:
    if kind is Kind.GAUGE:
        return other
    if isinstance(one, dict):
        return {label: one.get(label, 0) + other.get(label, 0) for label in {**one, **other}}
    return one + other


def known(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the known part of a payload: one of another version, from another node, must not crash this engine."""
    return {name: value for name, value in data.items() if name in MEASURES and _fits(MEASURES[name], value)}


def _fits(measure: Measure, value: Any) -> bool:
    if measure.label:
        return isinstance(value, dict) and all(isinstance(amount, int | float) for amount in value.values())
    if measure.kind is Kind.HISTOGRAM:
        return isinstance(value, list) and all(isinstance(seconds, int | float) for seconds in value)
    return isinstance(value, int | float)


def stats_from(data: dict[str, Any] | None) -> DepotStats:
    """Returns the stats object for a payload from another process."""
    return DepotStats(data=known(data or {}))
