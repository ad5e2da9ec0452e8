"""Measures the scheduler's part of a step while many requests wait: without a connector, and with kvdepot.

Requests that are not in the depot, and requests whose blocks are on its disk: those stay pending while they are read,
and vLLM asks for every waiting request in every step in which it has a free place. The model is tiny, so that a step
is short and the scheduler's part is seen.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from benches.engine.report import conditions_of, print_report, run_measurement
from benches.engine.runs import (
    Crowd,
    EngineKind,
    Prompts,
    crowd,
    forget,
    kvdepot_transfer,
    run_engine,
    send,
    settle,
    warm_up,
)
from tools.lab.depot import DepotHome
from tools.lab.machine import load_average
from tools.lab.models import WORK, ModelSize, make_model
from tools.lab.progress import Progress
from tools.lab.settings import add_set_option

SIZE = ModelSize(layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=256)
DTYPE = "float32"
PLAIN, MISSES, HITS = "no connector", "kvdepot, nothing found", "kvdepot, hits on disk"
SYSTEMS = {"plain": PLAIN, "misses": MISSES, "hits": HITS}
FIRST_SEED = 100_000
POOL_PARTS = 8
DRAIN_S = 120.0
FILL_BATCH = 50


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="requests, default 1000")
    parser.add_argument("--running", type=int, default=16, help="requests that run at a time, default 16")
    parser.add_argument("--tokens", type=int, default=257, help="tokens of a prompt, default 257")
    parser.add_argument("--answer-tokens", type=int, default=16, help="tokens of an answer, default 16")
    parser.add_argument("--steps", type=int, default=400, help="steps that are timed, default 400")
    parser.add_argument("--rounds", type=int, default=3, help="engines of each kind, by turns, default 3")
    text = "what to measure, default all"
    parser.add_argument("--systems", choices=tuple(SYSTEMS), nargs="+", default=list(SYSTEMS), help=text)
    add_set_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def on_disk(kind: EngineKind, prompts: Prompts, arguments: argparse.Namespace, settings: Mapping[str, Any]) -> Crowd:
    """Fills a depot's disk, restarts it with a pool of a part of that, and sends all requests."""
    stored_gb = len(prompts) * arguments.tokens * SIZE.kv_bytes_per_token(DTYPE) / (1 << 30)
    with DepotHome(WORK / "bench-engine" / "waiting-disk", {"pool_gb": max(2 * stored_gb, 0.125), **settings}) as home:
        transfer, stored = kvdepot_transfer(home), settle(home=home)
        with home.start() as depot:
            batches = [prompts[at : at + FILL_BATCH] for at in range(0, len(prompts), FILL_BATCH)]
            fill = [send("fill", batch, max_tokens=1, together=True) for batch in batches]
            run_engine("waiting-fill", kind, transfer, [*fill, stored])
            depot.wait_until_clean(DRAIN_S)
        home.configure({"pool_gb": max(stored_gb / POOL_PARTS, 0.0625), **settings})
        with home.start():
            return crowd_of(run_engine("waiting-disk", kind, transfer, steps_of(prompts, arguments)).crowds)


def measured(
    kind: EngineKind, prompts: Prompts, arguments: argparse.Namespace, settings: Mapping[str, Any], system: str
) -> Crowd:
    """One engine of one kind."""
    if system == HITS:
        return on_disk(kind, prompts, arguments, settings)
    if system == PLAIN:
        return crowd_of(run_engine("waiting-plain", kind, None, steps_of(prompts, arguments)).crowds)
    with DepotHome(WORK / "bench-engine" / "waiting", {"pool_gb": 1.0, **settings}) as home, home.start():
        return crowd_of(run_engine("waiting-misses", kind, kvdepot_transfer(home), steps_of(prompts, arguments)).crowds)


def steps_of(prompts: Prompts, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Warms up, then sends all requests."""
    return [
        send("warm-up", warm_up([arguments.tokens])),
        forget(),
        crowd("crowd", prompts, max_tokens=arguments.answer_tokens, steps=arguments.steps),
    ]


def crowd_of(crowds: Mapping[str, Crowd]) -> Crowd:
    """Returns the only crowd of a run."""
    return crowds["crowd"]


def summary(crowds: Sequence[Crowd], requests: int) -> dict[str, float]:
    """Returns figures over all engines of one kind, of steps before which at least a tenth of all requests waited."""
    times = [
        time
        for one in crowds
        for time, waiting in zip(one.schedule_ms, one.waiting, strict=True)
        if waiting >= requests / 10
    ]
    return {
        "steps": len(times),
        "p50_ms": median(times),
        "p99_ms": quantiles(times, n=100)[98],
        "max_ms": max(times),
        "requests_per_second": median([one.done / one.took_s for one in crowds]),
    }


def measure(arguments: argparse.Namespace, progress: Progress) -> int:
    """Runs all engines; exit status 1 when one failed."""
    before = load_average()
    with progress.step("make a model of random weights"):
        model = make_model(SIZE)
    kind = EngineKind(model, DTYPE, arguments.tokens + arguments.answer_tokens, arguments.running)
    prompts = [(FIRST_SEED + number, arguments.tokens) for number in range(arguments.requests)]
    crowds: dict[str, list[Crowd]] = {SYSTEMS[name]: [] for name in arguments.systems}
    for number in range(arguments.rounds):
        for system in crowds if number % 2 == 0 else reversed(crowds):
            with progress.step(f"round {number + 1} of {arguments.rounds}: {system}"):
                crowds[system].append(measured(kind, prompts, arguments, dict(arguments.settings), system))
    rows = {system: summary(found, arguments.requests) for system, found in crowds.items()}
    load = {"before": before, "after": load_average()}
    print_report(
        f"{arguments.requests} requests, {arguments.running} run: the scheduler's part of a step",
        ("", "steps", "p50", "p99", "longest", "requests/s"),
        rows,
        conditions_of(arguments, load, "requests", "running", "tokens", "answer_tokens", "rounds"),
        lambda row: (
            f"{row['steps']:.0f}",
            *(f"{row[name]:.2f} ms" for name in ("p50_ms", "p99_ms", "max_ms")),
            f"{row['requests_per_second']:.1f}",
        ),
        as_json=arguments.json,
    )
    return 0


def main() -> int:
    """Reads the command line and measures."""
    return run_measurement(parse, measure)


if __name__ == "__main__":
    sys.exit(main())
