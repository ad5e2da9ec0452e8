"""Measures what kvdepot costs a prompt of which it finds nothing: looked up, computed, stored.

Engine processes without a connector and with kvdepot take turns, in the order A B B A, and each computes the same
prompts. Speeds of two processes differ by some per cent for reasons of their own (where their memory lies), so only the
median over many pairs says something; its spread is printed beside it.
"""

import argparse
import random
import sys
from statistics import median

from benches.engine.report import conditions_of, print_report, run_measurement
from benches.engine.rounds import COLD
from benches.engine.runs import EngineKind, Result, Step, kvdepot_transfer, pool_bytes_for, run_engine, send, warm_up
from tools.lab.depot import DepotHome
from tools.lab.machine import load_average
from tools.lab.models import WORK, ModelSize, make_model
from tools.lab.progress import Progress
from tools.lab.settings import add_set_option

RESAMPLES = 10_000
INTERVAL = (0.05, 0.95)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of processes, default 6")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length, default 3")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192], help="lengths, default 4096 8192")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add_set_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def steps(lengths: list[int], repeats: int, pair: int) -> list[Step]:
    """Returns prompts that no process has seen before."""
    return [
        send("warm-up", warm_up(lengths)),
        *(
            send(f"{COLD}/{length}", [(length * 1000 + pair * 100 + number, length)], max_tokens=1)
            for number in range(repeats)
            for length in lengths
        ),
    ]


def ratio_interval(ratios: list[float]) -> tuple[float, float]:
    """Returns the 90 % interval of the median of such pairs, by resampling."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    low, high = (medians[int(share * (RESAMPLES - 1))] for share in INTERVAL)
    return low, high


def measure(arguments: argparse.Namespace, progress: Progress) -> int:
    """Runs all pairs; exit status 1 when an engine failed."""
    size = ModelSize()
    pool_gb = pool_bytes_for(size, arguments.dtype, arguments.tokens, arguments.repeats) / (1 << 30)
    pairs: list[dict[str, Result]] = []
    before = load_average()
    with progress.step("make a model of random weights"):
        model = make_model(size)
    kind = EngineKind.for_prompts(model, arguments.dtype, arguments.tokens)
    for number in range(arguments.pairs):
        plan = steps(arguments.tokens, arguments.repeats, number)
        results: dict[str, Result] = {}
        for side in ("plain", "kvdepot") if number % 2 == 0 else ("kvdepot", "plain"):
            with progress.step(f"pair {number + 1} of {arguments.pairs}: {side}"):
                if side == "plain":
                    results[side] = run_engine("overhead-plain", kind, None, plan)
                    continue
                values = {"pool_gb": pool_gb, **dict(arguments.settings)}
                with DepotHome(WORK / "bench-engine" / "overhead", values) as home, home.start():
                    results[side] = run_engine("overhead-kvdepot", kind, kvdepot_transfer(home), plan)
        pairs.append(results)
    rows = {}
    for length in arguments.tokens:
        times = {
            side: [pair[side].sent[f"{COLD}/{length}"].median_ms for pair in pairs] for side in ("plain", "kvdepot")
        }
        ratios = [ours / theirs for ours, theirs in zip(times["kvdepot"], times["plain"], strict=True)]
        low, high = ratio_interval(ratios)
        rows[length] = {
            "plain_ms": median(times["plain"]),
            "kvdepot_ms": median(times["kvdepot"]),
            "ratio": median(ratios),
            "ratio_low": low,
            "ratio_high": high,
            "ratios": ratios,
        }
    loads = [load for pair in pairs for result in pair.values() for load in result.load_average]
    load = {"before": before, "lowest": min(loads), "highest": max(loads)}
    print_report(
        "Time to first token with nothing found",
        ("tokens", "no connector", "kvdepot", "median ratio of pairs", "nine in ten"),
        rows,
        conditions_of(arguments, load, "pairs", "repeats", "dtype"),
        lambda row: (
            f"{row['plain_ms']:,.0f} ms",
            f"{row['kvdepot_ms']:,.0f} ms",
            f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f} … {row['ratio_high']:.3f}",
        ),
        as_json=arguments.json,
    )
    return 0


def main() -> int:
    """Reads the command line and measures."""
    return run_measurement(parse, measure)


if __name__ == "__main__":
    sys.exit(main())
