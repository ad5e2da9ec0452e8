"""Summary of rounds: medians, and ratios between measurements of the same minutes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from benches.engine.rounds import COLD, HIT, OWN
from benches.engine.runs import Result, Sent

Round = dict[str, Result]

WHOLE_MS = 100
TABLE_COLUMNS = 144
"""Terminal columns of the widest table."""

ROWS: tuple[tuple[str, str, str], ...] = (
    ("cold, no connector", "plain", COLD),
    ("vLLM's own prefix cache", "plain", OWN),
    ("kvdepot, from the pool", "kvdepot", HIT),
    ("kvdepot, after restart, from disk", "kvdepot-restarted", HIT),
    ("kvdepot, nothing found", "kvdepot", COLD),
    ("vLLM's offloading, from memory", "native-memory", HIT),
    ("vLLM's offloading, after restart, from files", "native-files-restarted", HIT),
    ("kvdepot below vLLM's offloading, after restart", "kvdepot-tier-restarted", HIT),
    ("vLLM's offloading, nothing found", "native-memory", COLD),
)
"""Title, process, and the name of its step."""


@dataclass(frozen=True)
class Cell:
    """One row at one length over all rounds. Times are milliseconds.

    Attributes:
        faster: for a hit, the factor to the cold runs that its own process did in between; for a cold row, the factor
            to the cold runs without a connector of the same round.
        of_own: factor of a hit's time to hits in vLLM's own prefix cache, of the same length, that its own process did
            in between; absent for a cold row.
    """

    ttft_ms: float
    fastest_ms: float
    slowest_ms: float
    faster: float
    of_own: float | None
    hit_tokens: tuple[int, ...]
    same_output: bool

    @staticmethod
    def of(rounds: Sequence[Mapping[str, Result]], process: str, step: str, length: int) -> "Cell":
        """Combines a row's rounds."""

        def sent(one: Mapping[str, Result], process: str, step: str) -> Sent:
            return one[process].sent[f"{step}/{length}"]

        mine = [sent(one, process, step) for one in rounds]
        cold = [sent(one, "plain" if step == COLD else process, COLD) for one in rounds]
        own = [] if step == COLD else [sent(one, process, OWN) for one in rounds]
        # A hit computes on fewer tokens at once than a cold run, so in bfloat16 it rounds like other hits.
        like = [sent(one, "plain", COLD if step == COLD else OWN) for one in rounds]
        times = [ms for one in mine for ms in one.ttft_ms]
        return Cell(
            ttft_ms=median(one.median_ms for one in mine),
            fastest_ms=min(times),
            slowest_ms=max(times),
            faster=median(c.median_ms / m.median_ms for c, m in zip(cold, mine, strict=True)),
            of_own=median(m.median_ms / o.median_ms for m, o in zip(mine, own, strict=True)) if own else None,
            hit_tokens=tuple(sorted({tokens for one in mine for tokens in one.hit_tokens})),
            same_output=all(m.outputs == other.outputs for m, other in zip(mine, like, strict=True)),
        )


def summarize(rounds: Sequence[Round], lengths: Sequence[int]) -> dict[str, dict[int, Cell]]:
    """Returns the rows of all processes that ran, at all lengths."""
    rows = [row for row in ROWS if row[1] in rounds[0]]
    return {title: {n: Cell.of(rounds, process, step, n) for n in lengths} for title, process, step in rows}


def milliseconds(value: float) -> str:
    """Returns a time as text, with a decimal where it matters."""
    return f"{value:,.0f}" if value >= WHOLE_MS else f"{value:.1f}"


def print_summary(rows: dict[str, dict[int, Cell]], lengths: Sequence[int], caption: str) -> None:
    """Prints a table for each length."""
    for length in lengths:
        table = Table(title=f"Time to first token, {length} tokens", title_style="bold", caption_justify="left")
        table.add_column("", no_wrap=True)
        for column in ("median", "min … max", "of own cache", "cold takes", "hit tokens", "output"):
            table.add_column(column, justify="right", no_wrap=True)
        for title, cells in rows.items():
            cell = cells[length]
            table.add_row(
                title,
                f"{milliseconds(cell.ttft_ms)} ms",
                f"{milliseconds(cell.fastest_ms)} … {milliseconds(cell.slowest_ms)}",
                f"{cell.of_own:.2f}×" if cell.of_own is not None else "",
                f"{cell.faster:.2f}×",
                " … ".join(str(tokens) for tokens in (cell.hit_tokens[0], cell.hit_tokens[-1])[: len(cell.hit_tokens)]),
                "same" if cell.same_output else "[red]differs[/]",
            )
        Console(width=TABLE_COLUMNS).print(table)
    print(caption)
