"""The demonstration's results: a table for people, an object for programs, and whether kvdepot's promises hold."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.table import Table

from tools.demo.client import Answer
from tools.demo.server import BLOCK_TOKENS
from tools.lab.machine import machine
from tools.lab.progress import Progress

COLUMNS_WITHOUT_TERMINAL = 120
COLD = "cold"
WARM = "warm, from the pool"
RESTARTED = "after kill -9, from disk"


@dataclass(frozen=True)
class Phase:
    """All prompts sent once, in sequence."""

    name: str
    answers: tuple[Answer, ...]
    hit_tokens: int
    prompt_tokens: int
    load_average: float

    @property
    def ttft_s(self) -> float:
        """Median time to the first token, in seconds."""
        return median(answer.ttft_s for answer in self.answers)

    @property
    def hit_blocks(self) -> int:
        """Blocks that came from the depot, as vLLM counted them."""
        return self.hit_tokens // BLOCK_TOKENS

    @property
    def total_blocks(self) -> int:
        """Full blocks of all prompts."""
        return len(self.answers) * (self.prompt_tokens // BLOCK_TOKENS)

    def same_output(self, other: "Phase") -> bool:
        """Returns whether every prompt was continued by the same tokens."""
        return [answer.tokens for answer in self.answers] == [answer.tokens for answer in other.answers]


def problems(phases: Sequence[Phase]) -> list[str]:
    """Returns broken promises; empty if there are none."""
    cold, *later = phases
    found = []
    if cold.hit_tokens:
        found.append(f"{cold.name}: {cold.hit_tokens} tokens were hit, though nothing had been stored")
    for phase in later:
        if phase.hit_blocks == 0:
            found.append(f"{phase.name}: no block was hit")
        if not phase.same_output(cold):
            found.append(f"{phase.name}: other output than cold")
    return found


def warnings(phases: Sequence[Phase]) -> list[str]:
    """Returns stored blocks that were not hits: they were recomputed, which is correct, but slow."""
    return [
        f"{phase.name}: {phase.hit_blocks} of {phase.total_blocks} blocks were hit, though all were stored"
        for phase in phases[1:]
        # The block with the token that vLLM has to compute.
        if 0 < phase.hit_blocks < phase.total_blocks - len(phase.answers)
    ]


def as_object(phases: Sequence[Phase], facts: dict[str, object]) -> dict[str, object]:
    """Returns everything as an object, for programs."""
    cold = phases[0]
    rows = [
        {
            "name": phase.name,
            "ttft_ms": [round(answer.ttft_s * 1e3, 1) for answer in phase.answers],
            "ttft_median_ms": round(phase.ttft_s * 1e3, 1),
            "speed_up": round(cold.ttft_s / phase.ttft_s, 2),
            "hit_blocks": phase.hit_blocks,
            "total_blocks": phase.total_blocks,
            "identical": phase.same_output(cold),
            "load_average": phase.load_average,
        }
        for phase in phases
    ]
    return {**facts, "phases": rows, "problems": problems(phases), "warnings": warnings(phases)}


def print_report(phases: Sequence[Phase], title: str, captions: Sequence[str]) -> None:
    """Prints the table."""
    cold = phases[0]
    table = Table(title=title, caption="\n".join(captions), caption_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for column in ("time to first token", "hits (blocks)", "speed-up", "output"):
        table.add_column(column, justify="right", no_wrap=True)
    for phase in phases:
        is_cold = phase is cold
        same = "[green]identical[/]" if phase.same_output(cold) else "[red]DIFFERS[/]"
        table.add_row(
            phase.name,
            f"{phase.ttft_s * 1e3:,.0f} ms",
            f"{phase.hit_blocks} of {phase.total_blocks}",
            "" if is_cold else f"[bold]{cold.ttft_s / phase.ttft_s:.1f}×[/]",
            "" if is_cold else same,
        )
    Console(width=None if sys.stdout.isatty() else COLUMNS_WITHOUT_TERMINAL).print(table)


def show(
    phases: Sequence[Phase],
    title: str,
    facts: dict[str, object],
    *,
    as_json: bool,
    captions: Sequence[str] = (),
) -> None:
    """Prints the table, or everything as JSON.

    Args:
        phases: all phases.
        title: of the table.
        facts: what the JSON says beside the phases and the machine.
        as_json: whether to print JSON.
        captions: further sentences below the table.
    """
    here = machine()
    if as_json:
        print(json.dumps(as_object(phases, {**facts, "machine": here}), indent=2))
        return
    loads = ", ".join(f"{phase.load_average:.1f}" for phase in phases)
    common = [
        f"Medians of {len(phases[0].answers)} prompts; load average {loads} on {here['cores']} cores.",
        "The kernel may have had files still in its page cache. The depot was drained before it was killed.",
    ]
    print_report(phases, title, [*common, *captions])


def conclude(phases: Sequence[Phase], progress: Progress) -> int:
    """Says what was slow or wrong. Returns the exit status: 0 if no promise is broken."""
    for warning in warnings(phases):
        progress.note(f"! {warning}")
    broken = problems(phases)
    for problem in broken:
        progress.failure(problem)
    return 1 if broken else 0
