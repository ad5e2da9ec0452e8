"""Samples of each side, their medians, and ratios of one round: kvdepot to the best peer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 200
SHORTEST = 1e-6
Sample = Mapping[str, float]


@dataclass(frozen=True)
class Metric:
    """What is measured.

    Attributes:
        name: its key in the JSON output.
        heading: its column.
        digits: decimal places in a table.
        rate: whether more is better.
    """

    name: str
    heading: str
    digits: int = 2
    rate: bool = True

    def ratio(self, ours: float, theirs: float) -> float:
        """Returns how many times better ours is. A time too short to be measured counts as the shortest one."""
        better, worse = (ours, theirs) if self.rate else (theirs, ours)
        return max(better, SHORTEST) / max(worse, SHORTEST)


@dataclass
class Results:
    """Samples of one comparison, by case and side; the n-th sample of every side is of the n-th round.

    Attributes:
        title: of its table.
        metrics: its columns.
        peers: sides that kvdepot is compared with.
        beside: for a side of kvdepot, another one that it is compared with as well.
        samples: what was measured.
        counts: wrong and missing blocks of all loads, by case and side.
    """

    title: str
    metrics: Sequence[Metric]
    peers: Sequence[str]
    beside: Mapping[str, str] = field(default_factory=dict)
    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)
    counts: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)

    def add(self, case: str, side: str, sample: Sample, counts: Mapping[str, int]) -> None:
        """Adds the sample of a round."""
        self.samples.setdefault((case, side), []).append(sample)
        total = self.counts.setdefault((case, side), {})
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count

    def values(self, case: str, side: str, metric: Metric) -> list[float]:
        """Returns the samples of a metric."""
        return [sample[metric.name] for sample in self.samples.get((case, side), []) if metric.name in sample]

    def of_best_peer(self, case: str, side: str, metric: Metric) -> float | None:
        """Returns the median over the rounds of the ratio to the peer that was best in that round."""
        return None if side in self.peers else self._ratio(case, side, metric, self.peers)

    def of_other(self, case: str, side: str, metric: Metric) -> float | None:
        """Returns the median over the rounds of the ratio to the other side of kvdepot; None if there is none."""
        return self._ratio(case, side, metric, [self.beside[side]]) if side in self.beside else None

    def _ratio(self, case: str, side: str, metric: Metric, others: Sequence[str]) -> float | None:
        ours = self.values(case, side, metric)
        theirs = [found for other in others if (found := self.values(case, other, metric))]
        if not ours or not theirs:
            return None
        best = [max(round_) if metric.rate else min(round_) for round_ in zip(*theirs, strict=True)]
        return median(metric.ratio(one, other) for one, other in zip(ours, best, strict=True))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields each case and side with its samples, medians and ratios."""
        for case, side in self.samples:
            found = {metric.name: self.values(case, side, metric) for metric in self.metrics}
            ratios = {metric.name: self.of_best_peer(case, side, metric) for metric in self.metrics}
            others = {metric.name: self.of_other(case, side, metric) for metric in self.metrics}
            yield {
                "case": case,
                "side": side,
                "samples": {name: values for name, values in found.items() if values},
                "median": {name: median(values) for name, values in found.items() if values},
                "of_best_peer": {name: ratio for name, ratio in ratios.items() if ratio is not None},
                "of_other": {name: ratio for name, ratio in others.items() if ratio is not None},
                **self.counts[case, side],
            }

    def print(self) -> None:
        """Prints a table for each case: median (least to most), and below ours the ratio to the best peer."""
        for case in dict.fromkeys(case for case, _ in self.samples):
            table = Table(title=f"{self.title}: {case}", title_style="bold", title_justify="left")
            table.add_column("", no_wrap=True)
            for metric in self.metrics:
                table.add_column(metric.heading, justify="right")
            table.add_column("wrong blocks", justify="right")
            for side in [side for other, side in self.samples if other == case]:
                counts = self.counts[case, side]
                wrong = f"{counts['wrong']} of {counts['loaded']}" if "loaded" in counts else ""
                if counts.get("failed"):
                    wrong += f", {counts['failed']} missing"
                cells = [spread(self.values(case, side, metric), metric.digits) for metric in self.metrics]
                table.add_row(side, *cells, wrong)
                best = [self.of_best_peer(case, side, metric) for metric in self.metrics]
                other = [self.of_other(case, side, metric) for metric in self.metrics]
                for name, ratios in (("the best peer", best), (self.beside.get(side, ""), other)):
                    if any(ratio is not None for ratio in ratios):
                        shown = ["" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
                        table.add_row(f"  times {name}", *shown, "", style="dim")
            Console(width=WIDTH).print(table)


def spread(values: Sequence[float], digits: int) -> str:
    """Returns the median, and the least and the most if there are several values."""
    if not values:
        return ""
    middle = f"{median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f}…{max(values):.{digits}f})"
