"""Measures the time to the first token of real vLLM: cold, hits of kvdepot, hits of vLLM's own caches.

Configurations take turns, one engine process each, for some rounds. A hit is compared with cold runs, and with hits in
vLLM's own prefix cache that the same process made in between. The time is vLLM's own, from a request's arrival to its
first token. Look at the ratios, and at the load averages.
"""

import argparse
import json
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict

from benches.engine.report import run_measurement
from benches.engine.rounds import CONFIGURATIONS, Bench, run_round
from benches.engine.runs import DEVICES, EngineKind, pool_bytes_for
from benches.engine.summary import Round, print_summary, summarize
from tools.lab.machine import load_average, machine
from tools.lab.models import SIZES, make_model
from tools.lab.progress import Progress
from tools.lab.settings import add_set_option


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length, default 3")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192], help="lengths, default 4096 8192")
    parser.add_argument("--device", choices=tuple(DEVICES), default="cpu", help="what vLLM computes on, default cpu")
    parser.add_argument("--size", choices=tuple(SIZES), default="small", help="parameters, default small: 94 M")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--only",
        choices=tuple(CONFIGURATIONS),
        action="append",
        help="only this one beside vLLM alone; may be repeated",
    )
    parser.add_argument("--keep-page-cache", action="store_true", help="read files that the kernel still has in memory")
    add_set_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, progress: Progress) -> int:
    """Runs all rounds; exit status 1 when an engine failed or an output was wrong."""
    size = SIZES[arguments.size]
    lengths = tuple(arguments.tokens)
    rounds: list[Round] = []
    before = load_average()
    with progress.step("make a model of random weights"):
        model = make_model(size)
    kind = EngineKind.for_prompts(model, arguments.dtype, lengths, arguments.device)
    bench = Bench(
        kind=kind,
        lengths=lengths,
        repeats=arguments.repeats,
        pool_bytes=pool_bytes_for(size, arguments.dtype, lengths, arguments.repeats),
        keep_page_cache=arguments.keep_page_cache,
        settings=dict(arguments.settings),
    )
    for number in range(1, arguments.rounds + 1):

        def step(text: str, number: int = number) -> AbstractContextManager[None]:
            return progress.step(f"round {number} of {arguments.rounds}: {text}")

        rounds.append(run_round(bench, arguments.only or tuple(CONFIGURATIONS), step))
    rows = summarize(rounds, lengths)
    loads = [load for one in rounds for result in one.values() for load in result.load_average]
    conditions: dict[str, object] = {
        "machine": machine(),
        "load_average": {"before": before, "lowest": min(loads), "highest": max(loads)},
        "page_cache": "kept" if arguments.keep_page_cache else "dropped before each restart",
        **{name: getattr(arguments, name) for name in ("rounds", "repeats", "device", "dtype")},
        "settings": dict(arguments.settings),
        "model": vars(size),
    }
    if arguments.json:
        table = {title: {str(n): asdict(cell) for n, cell in cells.items()} for title, cells in rows.items()}
        print(json.dumps({"conditions": conditions, "rows": table}, indent=2))
    else:
        print_summary(rows, lengths, "\n".join(f"{name}: {value}" for name, value in conditions.items()))
    wrong = [title for title, cells in rows.items() if not all(cell.same_output for cell in cells.values())]
    for title in wrong:
        progress.failure(f"{title}: other output than vLLM alone")
    return 1 if wrong else 0


def main() -> int:
    """Reads the command line and measures."""
    return run_measurement(parse, measure)


if __name__ == "__main__":
    sys.exit(main())
