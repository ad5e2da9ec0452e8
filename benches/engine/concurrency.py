"""Concurrent requests whose prompts are all known: throughput and time to first token, beside vLLM's own prefix cache.

All prompts share their first part. They are computed once; then all are sent at once, again and again: with their KV
in vLLM's own prefix cache, and with that cache emptied, so that it comes from the depot. Engines without a connector
and with vLLM's own offloading do the same. "Of own cache" is a throughput beside that of vLLM's own prefix cache,
without a connector, in the same round.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benches.engine.report import conditions_of, print_report, run_measurement
from benches.engine.runs import (
    EngineKind,
    Prompts,
    Result,
    Sent,
    Step,
    forget,
    kvdepot_transfer,
    native_transfer,
    pool_bytes_for,
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

OWN, HIT = "own", "hit"
"""Steps: hits in vLLM's own prefix cache, and in the connector's."""
PLAIN, POOL, NATIVE = "plain", "kvdepot", "native"
ROWS: Mapping[str, tuple[str, str]] = {
    "vLLM's own prefix cache": (PLAIN, OWN),
    "the same, with kvdepot attached": (POOL, OWN),
    "kvdepot, from the pool": (POOL, HIT),
    "vLLM's offloading, from memory": (NATIVE, HIT),
}
"""Title, process, and the name of its step."""
SHARED_SEED, FIRST_SEED = 200_000, 200_001

Round = Mapping[str, Result]


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16, help="requests sent at once, default 16")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a prompt that can be hit, default 2048")
    parser.add_argument("--shared", type=float, default=0.5, help="part of a prompt that all share, default 0.5")
    parser.add_argument("--answer-tokens", type=int, default=16, help="tokens of an answer, default 16")
    parser.add_argument("--repeats", type=int, default=6, help="times that all are sent in each process, default 6")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each kind, by turns, default 2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="default bfloat16")
    text = "what to measure beside vLLM's own prefix cache, default both"
    parser.add_argument("--systems", choices=(POOL, NATIVE), nargs="+", default=[POOL, NATIVE], help=text)
    add_set_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def prompts_of(requests: int, tokens: int, shared: float) -> Prompts:
    """Returns prompts of one token more than can be hit, of which all share the first part."""
    first = int(tokens * shared)
    return [(SHARED_SEED, first, FIRST_SEED + number, tokens - first + 1) for number in range(requests)]


def steps_of(prompts: Prompts, stored: Step | None, arguments: argparse.Namespace) -> list[Step]:
    """Computes all prompts, then sends them at once: hits in vLLM's own cache, and, if ``stored``, the connector's."""

    def at_once(name: str) -> Step:
        return send(name, prompts, max_tokens=arguments.answer_tokens, together=True)

    # The tail of a prompt that is computed on a hit has another shape than a whole one, so that is warmed up, too.
    steps = [send("warm-up", warm_up([arguments.tokens])), forget(), at_once("fill"), at_once("warm-up")]
    for _ in range(arguments.repeats):
        steps.append(at_once(OWN))
        if stored is not None:
            steps += [stored, forget(), at_once(HIT)]
    return steps


def measured(system: str, kind: EngineKind, prompts: Prompts, pool_bytes: int, arguments: argparse.Namespace) -> Result:
    """One process of one kind."""
    name = f"concurrency-{system}"
    if system == PLAIN:
        return run_engine(name, kind, None, steps_of(prompts, None, arguments))
    if system == NATIVE:
        transfer = native_transfer(pool_bytes, None, kind.device)
        return run_engine(name, kind, transfer, steps_of(prompts, settle(), arguments))
    home = DepotHome(
        WORK / "bench-engine" / "concurrency", {"pool_gb": pool_bytes / (1 << 30), **dict(arguments.settings)}
    )
    with home, home.start():
        return run_engine(name, kind, kvdepot_transfer(home), steps_of(prompts, settle(home=home), arguments))


def per_second(sent: Sent, requests: int) -> float:
    """Returns the median throughput, in requests per second."""
    return requests / median(sent.took_s)


def summary(rounds: Sequence[Round], requests: int) -> dict[str, dict[str, Any]]:
    """Returns the figures of each row over all rounds.

    ``of_own`` is the median over rounds of a throughput beside that of vLLM's own prefix cache in the same round, and
    ``of_own_range`` its extremes.
    """
    found = {}
    for title, (process, step) in ROWS.items():
        if process not in rounds[0]:
            continue
        sent = [one[process].sent[step] for one in rounds]
        own = [one[PLAIN].sent[OWN] for one in rounds]
        times = sorted(ms for one in sent for ms in one.ttft_ms)
        ratios = [
            per_second(mine, requests) / per_second(theirs, requests) for mine, theirs in zip(sent, own, strict=True)
        ]
        found[title] = {
            "requests_per_second": median(per_second(one, requests) for one in sent),
            "of_own": median(ratios),
            "of_own_range": (min(ratios), max(ratios)),
            "ttft_p50_ms": median(times),
            "ttft_p99_ms": quantiles(times, n=100, method="inclusive")[98],
            "hit_tokens": sorted({tokens for one in sent for tokens in one.hit_tokens}),
            # Requests that are computed together may round otherwise than in another order, so outputs are compared
            # with those of the same requests from vLLM's own cache.
            "same_output": all(
                mine.outputs[: len(theirs.outputs)] == theirs.outputs[: len(mine.outputs)]
                for mine, theirs in zip(sent, own, strict=True)
            ),
        }
    return found


def cells(row: Mapping[str, Any]) -> list[str]:
    """Returns the texts of a row."""
    low, high = row["of_own_range"]
    return [
        f"{row['requests_per_second']:.1f}",
        f"{row['of_own']:.2f} ({low:.2f} … {high:.2f})",
        f"{row['ttft_p50_ms']:.0f} ms",
        f"{row['ttft_p99_ms']:.0f} ms",
        " ".join(map(str, row["hit_tokens"])),
        "same" if row["same_output"] else "differs",
    ]


def measure(arguments: argparse.Namespace, progress: Progress) -> int:
    """Runs all engines; exit status 1 when one failed, or in float32 when a hit of kvdepot's changed the output."""
    before, size = load_average(), ModelSize()
    with progress.step("make a model of random weights"):
        model: Path = make_model(size)
    kind = EngineKind(model, arguments.dtype, arguments.tokens + 1 + arguments.answer_tokens, arguments.requests)
    prompts = prompts_of(arguments.requests, arguments.tokens, arguments.shared)
    pool_bytes = pool_bytes_for(size, arguments.dtype, [arguments.tokens], arguments.requests)
    systems = [PLAIN, *arguments.systems]
    rounds = []
    for number in range(arguments.rounds):
        found = {}
        for system in systems if number % 2 == 0 else reversed(systems):
            with progress.step(f"round {number + 1} of {arguments.rounds}: {system}"):
                found[system] = measured(system, kind, prompts, pool_bytes, arguments)
        rounds.append(found)
    rows = summary(rounds, arguments.requests)
    names = ("requests", "tokens", "shared", "answer_tokens", "repeats", "rounds", "dtype")
    print_report(
        f"{arguments.requests} requests of {arguments.tokens} tokens at once, {arguments.shared:.0%} shared",
        ("", "requests/s", "of own cache", "first token p50", "p99", "hit tokens", "output"),
        rows,
        conditions_of(arguments, {"before": before, "after": load_average()}, *names),
        cells,
        as_json=arguments.json,
    )
    # In bfloat16, requests that are computed beside others may round otherwise.
    differs = [title for title, row in rows.items() if "kvdepot" in title and not row["same_output"]]
    for title in differs:
        progress.failure(f"{title}: other output than from vLLM's own prefix cache")
    return 1 if differs and arguments.dtype == "float32" else 0


def main() -> int:
    """Reads the command line and measures."""
    return run_measurement(parse, measure)


if __name__ == "__main__":
    sys.exit(main())
