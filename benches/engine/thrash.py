"""Concurrent hits that exceed the memory above the disk: does every request still get what is stored for it?

Prompts are computed one by one and stored on disk; engine and depot are started anew; then all prompts are sent at
once, twice, with a pool of a part of their size. Each request's hit is printed; "output" says whether it was continued
as when it was computed alone. Exit status 1 when that differs with kvdepot, or when one of its requests got nothing.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benches.engine.report import run_measurement
from benches.engine.runs import (
    BLOCK_TOKENS,
    EngineKind,
    Prompts,
    Sent,
    Step,
    empty_directory,
    forget,
    kvdepot_transfer,
    native_transfer,
    run_engine,
    send,
    settle,
)
from tools.lab.depot import DepotHome
from tools.lab.machine import load_average
from tools.lab.models import WORK, ModelSize, make_model
from tools.lab.progress import Progress
from tools.lab.settings import add_set_option

DRAIN_S = 120.0
ANSWER_TOKENS = 4
FIRST_SEED = 70_000
RUNS = ("first", "second")
KVDEPOT, NATIVE = "kvdepot", "vLLM's tiers"


@dataclass(frozen=True)
class Outcome:
    """All requests sent together, on one system."""

    system: str
    alone: Sent
    together: tuple[Sent, ...]

    def same_output(self, run: Sent) -> bool:
        """Returns whether every request was continued as when it ran alone."""
        return run.outputs == self.alone.outputs

    def problems(self) -> list[str]:
        """Returns broken promises."""
        found = []
        for name, run in zip(RUNS, self.together, strict=True):
            if not self.same_output(run):
                found.append(f"{self.system}, {name} time: other output than alone")
            if not all(run.hit_tokens):
                found.append(f"{self.system}, {name} time: a request got nothing: {list(run.hit_tokens)}")
        return found


def on_kvdepot(kind: EngineKind, prompts: Prompts, pool_bytes: int, settings: Mapping[str, Any]) -> Outcome:
    """Fills a depot's disk, restarts it, sends everything together."""
    values = {"pool_gb": pool_bytes / (1 << 30), **settings}
    with DepotHome(WORK / "bench-engine" / "thrash", values) as home:
        transfer, stored = kvdepot_transfer(home), settle(home=home)
        with home.start() as depot:
            alone = run_engine("thrash-fill", kind, transfer, one_by_one(prompts, stored)).sent["alone"]
            depot.wait_until_clean(DRAIN_S)
        with home.start():
            sent = run_engine("thrash-kvdepot", kind, transfer, all_at_once(prompts, stored)).sent
        return Outcome(KVDEPOT, alone, tuple(sent[name] for name in RUNS))


def on_native(kind: EngineKind, prompts: Prompts, pool_bytes: int) -> Outcome:
    """The same with vLLM's own memory and file tiers."""
    directory: Path = empty_directory(WORK / "bench-engine" / "thrash-native")
    transfer, stored = native_transfer(pool_bytes, directory, kind.device), settle(directory=directory)
    alone = run_engine("thrash-native-fill", kind, transfer, one_by_one(prompts, stored)).sent["alone"]
    sent = run_engine("thrash-native", kind, transfer, all_at_once(prompts, stored)).sent
    return Outcome(NATIVE, alone, tuple(sent[name] for name in RUNS))


def one_by_one(prompts: Prompts, stored: Step) -> list[Step]:
    """Computes each prompt after the previous one has been stored: a small pool cannot take them all together."""
    return [step for one in prompts for step in (send("alone", [one], max_tokens=ANSWER_TOKENS), stored)]


def all_at_once(prompts: Prompts, stored: Step) -> list[Step]:
    """Sends all prompts together, twice."""
    steps: list[Step] = []
    for name in RUNS:
        steps += [send(name, prompts, max_tokens=ANSWER_TOKENS, together=True), stored, forget()]
    return steps


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6, help="default 6")
    parser.add_argument("--tokens", type=int, default=1536, help="tokens of a prompt that can be hit, default 1536")
    parser.add_argument("--pool-part", type=float, default=0.4, help="pool, as a part of all prompts' KV; default 0.4")
    parser.add_argument("--system", choices=("both", "kvdepot", "native"), default="both")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    add_set_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def print_outcomes(outcomes: Sequence[Outcome], title: str, full: int) -> None:
    """Prints a row for each run."""
    table = Table(title=title, title_style="bold")
    for column in ("", "time", "hit tokens of each request", "of all", "slowest first token", "output"):
        table.add_column(column, no_wrap=True)
    for outcome in outcomes:
        for name, run in zip(RUNS, outcome.together, strict=True):
            table.add_row(
                outcome.system,
                name,
                " ".join(map(str, run.hit_tokens)),
                f"{sum(run.hit_tokens) / (full * len(run.hit_tokens)):.0%}",
                f"{max(run.ttft_ms):,.0f} ms",
                "same" if outcome.same_output(run) else "[red]differs[/]",
            )
    Console(width=120).print(table)


def measure(arguments: argparse.Namespace, progress: Progress) -> int:
    """Runs the requested measurements."""
    size = ModelSize()
    prompts = [(FIRST_SEED + number, arguments.tokens + 1) for number in range(arguments.requests)]
    stored_bytes = arguments.requests * arguments.tokens * size.kv_bytes_per_token(arguments.dtype)
    pool_bytes = int(arguments.pool_part * stored_bytes)
    outcomes = []
    with progress.step("make a model of random weights"):
        model = make_model(size)
    kind = EngineKind(model, arguments.dtype, arguments.tokens + 1 + ANSWER_TOKENS, arguments.requests)
    if arguments.system in {"both", "kvdepot"}:
        with progress.step(f"{KVDEPOT}: fill, start again, send all at once"):
            outcomes.append(on_kvdepot(kind, prompts, pool_bytes, dict(arguments.settings)))
    if arguments.system in {"both", "native"}:
        with progress.step(f"{NATIVE}: fill, start again, send all at once"):
            outcomes.append(on_native(kind, prompts, pool_bytes))
    full = arguments.tokens - arguments.tokens % BLOCK_TOKENS
    if arguments.json:
        rows = [
            {
                "system": outcome.system,
                "time": name,
                "hit_tokens": run.hit_tokens,
                "ttft_ms": run.ttft_ms,
                "same_output": outcome.same_output(run),
            }
            for outcome in outcomes
            for name, run in zip(RUNS, outcome.together, strict=True)
        ]
        print(json.dumps({"full_hit_tokens": full, "pool_bytes": pool_bytes, "rows": rows}, indent=2))
    else:
        title = f"{arguments.requests} requests of {arguments.tokens} tokens at once, pool {arguments.pool_part:.0%}"
        print_outcomes(outcomes, title, full)
        print(f"pool {pool_bytes / (1 << 20):.0f} MiB; load average {load_average()}")
    problems = [text for outcome in outcomes if outcome.system == KVDEPOT for text in outcome.problems()]
    for problem in problems:
        progress.failure(problem)
    return 1 if problems else 0


def main() -> int:
    """Reads the command line and measures."""
    return run_measurement(parse, measure)


if __name__ == "__main__":
    sys.exit(main())
