"""A comparison: its cases and sides, and how one side is measured once."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from benches.peers.lab import Place
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


class Program(Protocol):
    """Something that a side needs and that may not be installed."""

    @property
    def name(self) -> str:
        """Its name, for people."""

    @property
    def version(self) -> str | None:
        """Its version; None if it cannot run here."""

    @property
    def missing(self) -> str:
        """Why it cannot run here."""


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
    needs: Mapping[str, Program] = MappingProxyType({})
    """What each side needs besides kvdepot. A side whose program is missing is left out."""
    shapes: Sequence[Shape]
    smoke_shapes: Sequence[Shape]
    ours: Sequence[str]
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

    def programs(self) -> list[Program]:
        """Returns what the sides need, each program once."""
        return list({program.name: program for program in self.needs.values()}.values())

    def left_out(self) -> str | None:
        """Returns why sides are missing from the results; None if all are there."""
        missing = [f"{one.name}: {one.missing}" for one in self.programs() if one.version is None]
        return "; ".join(missing) or None

    @abstractmethod
    def measure(self, side: str, shape: Shape, round_: int) -> Outcome:
        """Measures a side once."""

    def run(self, rounds: int, *, smoke: bool, note: Callable[[str], None]) -> Results:
        """Measures all sides round by round, in alternating order."""
        self.smoke = smoke
        sides = [side for side in (self.smoke_sides if smoke else (*self.ours, *self.peers)) if self._can_run(side)]
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

    def _can_run(self, side: str) -> bool:
        return side not in self.needs or self.needs[side].version is not None


def counted(*loads: dict[str, Any]) -> Counts:
    """Returns the sum of what loads say about wrong and missing blocks."""
    return {name: sum(load[name] for load in loads) for name in COUNTED}
