"""A comparison: its cases and sides, and how one side is measured once."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from benches.peers.lab import Environment, Place
from benches.peers.results import Metric, Results, Sample
from benches.peers.work import MIB, Shape

Counts = dict[str, int]
COUNTED = ("wrong", "failed", "loaded")
WARM_UP, MEASURED = 1, 2
"""Epochs of a side's data."""
HELD = 3
"""Each side's memory holds this many epochs, so that no dump waits for a write."""


def held_bytes(shape: Shape) -> int:
    """Returns the bytes of memory that each side gets for a shape."""
    return HELD * shape.bytes + 64 * MIB


@dataclass(frozen=True)
class Outcome:
    """What one side did in one round."""

    sample: Sample
    counts: Counts


class Comparison(ABC):
    """kvdepot beside one peer, or a yardstick."""

    name: str
    title: str
    metrics: Sequence[Metric]
    environment: Environment | None = None
    shapes: Sequence[Shape]
    smoke_shapes: Sequence[Shape]
    ours: Sequence[str]
    ours_over_peer: Sequence[str] = ()
    """Sides of kvdepot that need the peer's package."""
    peers: Sequence[str]
    beside: Mapping[str, str] = MappingProxyType({})
    """For a side of kvdepot, another one that it is compared with as well."""
    smoke_sides: Sequence[str]

    def __init__(self, place: Place) -> None:
        self.place = place
        self.smoke = False
        self._doing = ""

    def doing(self) -> str:
        """Returns what is being measured."""
        return self._doing

    def missing(self) -> str | None:
        """Returns why the peers cannot run here; None if they can."""
        if self.environment is None or self.environment.version is not None:
            return None
        return f"{self.environment.name}: {self.environment.missing}"

    def left_out(self) -> str | None:
        """Returns why peers are missing from the results; None if all are there."""
        return self.missing()

    @abstractmethod
    def measure(self, side: str, shape: Shape, round_: int) -> Outcome:
        """Measures a side once."""

    def run(self, rounds: int, *, smoke: bool, note: Callable[[str], None]) -> Results:
        """Measures all sides round by round, in alternating order."""
        self.smoke = smoke
        there = self.missing() is None
        sides = [*self.ours, *((*self.ours_over_peer, *self.peers) if there else ())]
        if smoke:
            sides = [side for side in sides if side in self.smoke_sides]
        results = Results(self.title, self.metrics, self.peers, self.beside)
        for shape in self.smoke_shapes if smoke else self.shapes:
            note(f"{self.name}: {shape}")
            for round_ in range(rounds):
                measured: dict[str, Outcome] = {}
                for side in sides if round_ % 2 == 0 else reversed(sides):
                    self._doing = f"{shape}, round {round_ + 1} of {rounds}, {side}"
                    measured[side] = self.measure(side, shape, round_)
                for side in sides:
                    results.add(str(shape), side, measured[side].sample, measured[side].counts)
        return results


def counted(*loads: dict[str, Any]) -> Counts:
    """Returns the sum of what loads say about wrong and missing blocks."""
    return {name: sum(load[name] for load in loads) for name in COUNTED}
