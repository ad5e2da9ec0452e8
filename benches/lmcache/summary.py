"""Summaries: a row for each second level and step, with ratios between measurements of one process or one round."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benches.engine.rounds import COLD, HIT, OWN
from benches.engine.summary import Cell
from benches.lmcache.stack import Life

Round = dict[str, Life]
PLAIN, RESTARTED = "plain", ", restarted"
L1, L2 = "L1", "L2"
STEPS: tuple[tuple[str, str, str], ...] = (
    ("nothing found", "", COLD),
    ("from LMCache's memory", "", L1),
    ("from the second level", "", L2),
    ("after a restart", RESTARTED, HIT),
)
"""Title, suffix of the process's name, and its step."""


@dataclass(frozen=True)
class Row:
    """One step with one second level, over all rounds.

    Attributes:
        title: of the level, empty for vLLM alone.
        step: what was asked for.
        cell: times, tokens that vLLM took from elsewhere, and whether the answers are the right ones.
        asked_tokens: tokens of a prompt that could be found.
        found: tokens that LMCache has found in each of its levels, over all prompts.
    """

    title: str
    step: str
    cell: Cell
    asked_tokens: int
    found: Mapping[str, int]


def summarize(rounds: Sequence[Round], titles: Mapping[str, str], tokens: int) -> list[Row]:
    """Returns the rows of vLLM alone, and of all levels, whose titles are given by their names."""
    names = (("computed", COLD), ("its own prefix cache", OWN))
    rows = [Row("vLLM alone", title, Cell.of(rounds, PLAIN, step, tokens), tokens, {}) for title, step in names]
    for name, title in titles.items():
        for step_title, suffix, step in STEPS:
            cell = Cell.of(rounds, name + suffix, step, tokens)
            rows.append(Row(title, step_title, cell, tokens, _found(rounds, name + suffix, f"{step}/{tokens}")))
    return rows


def _found(rounds: Sequence[Round], process: str, step: str) -> dict[str, int]:
    every = [one[process].found.get(step, {}) for one in rounds]
    return {level: sum(one.get(level, 0) for one in every) for level in (L1, L2)}


@dataclass(frozen=True)
class Queries:
    """A run of the documents' workload with one second level.

    Attributes:
        seconds: of all queries.
        ttft_ms: time to first token of each query.
        failed: number of queries without an answer.
        asked_tokens: tokens of all queries' prompts.
        vllm_tokens: of these, what vLLM's connector has found.
        found: what LMCache has found, by its levels.
        load_average: at the end.
    """

    seconds: float
    ttft_ms: tuple[float, ...]
    failed: int
    asked_tokens: int
    vllm_tokens: int
    found: Mapping[str, int]
    load_average: float


@dataclass(frozen=True)
class QueriesRow:
    """One second level over all rounds.

    Attributes:
        seconds: median of the rounds.
        mean_ttft_ms: median over the rounds of the mean time to first token.
        median_ttft_ms: median over the rounds of the median.
        seconds_of_off: median of the ratios to the run of the same round without a second level.
        ttft_of_off: the same, of the mean times to first token.
        hit_part: the least part of the asked tokens that was found in any round.
        l2_part: the least part that the second level had.
        failed: sum of the rounds.
    """

    seconds: float
    mean_ttft_ms: float
    median_ttft_ms: float
    seconds_of_off: float | None
    ttft_of_off: float | None
    hit_part: float
    l2_part: float
    failed: int


def summarize_queries(rounds: Sequence[Mapping[str, Queries]], off: str) -> dict[str, QueriesRow]:
    """Returns the rows of all runs, by their name; ``off`` is the one without a second level."""
    return {name: _queries_row([one[name] for one in rounds], [one.get(off) for one in rounds]) for name in rounds[0]}


def _queries_row(mine: Sequence[Queries], off: Sequence[Queries | None]) -> QueriesRow:
    def ratio(value: Callable[[Queries], float]) -> float | None:
        pairs = [(value(one), value(other)) for one, other in zip(mine, off, strict=True) if other is not None]
        return median(one / other for one, other in pairs) if pairs else None

    return QueriesRow(
        seconds=median(one.seconds for one in mine),
        mean_ttft_ms=median(mean_ttft_ms(one) for one in mine),
        median_ttft_ms=median(median(one.ttft_ms) for one in mine),
        seconds_of_off=ratio(lambda one: one.seconds),
        ttft_of_off=ratio(mean_ttft_ms),
        hit_part=min(one.vllm_tokens / one.asked_tokens for one in mine),
        l2_part=min(one.found.get(L2, 0) / one.asked_tokens for one in mine),
        failed=sum(one.failed for one in mine),
    )


def mean_ttft_ms(queries: Queries) -> float:
    """Returns the mean time to first token."""
    return sum(queries.ttft_ms) / len(queries.ttft_ms)
