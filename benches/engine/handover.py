"""Measures a hand-over: one vLLM computes prompts, another on a depot of its own takes their KV from a pool server.

The second's time to first token is compared with cold runs that its own process does in between.
"""

import argparse
import json
import sys
from statistics import median

from benches.engine.report import run_measurement
from benches.engine.rounds import COLD, HIT, Bench
from benches.engine.runs import EngineKind, kvdepot_transfer, run_engine, send, settle
from tools.lab.depot import DepotHome
from tools.lab.machine import load_average, machine
from tools.lab.models import WORK, ModelSize, make_model
from tools.lab.progress import Progress
from tools.wire.servers import Server

POOL_GB = 1.0
DRAIN_S = 120.0


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length, default 3")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096], help="lengths, default 4096")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, progress: Progress) -> int:
    """Runs both engines; exit status 1 when one failed or an output differs."""
    lengths = tuple(arguments.tokens)
    root = WORK / "bench-engine" / "handover"
    with progress.step("make a model of random weights"):
        kind = EngineKind.for_prompts(make_model(ModelSize()), arguments.dtype, lengths)
    bench = Bench(kind, lengths, arguments.repeats, 0, keep_page_cache=False, settings={})
    with Server("kvdepot") as server:
        remote = {"pipeline": "Cache|Remote", "directories": None, "remote_servers": [server.address]}
        every = [send(f"{COLD}/{n}", [one]) for n in lengths for one in bench.prompts(n)]
        values = {**remote, "pool_gb": POOL_GB}
        with (
            progress.step("the producer computes"),
            DepotHome(root / "producer", values) as home,
            home.start() as depot,
        ):
            first = run_engine("producer", kind, kvdepot_transfer(home), [*every, settle(home=home)])
            depot.wait_until_clean(DRAIN_S)
        with progress.step("the consumer takes over"), DepotHome(root / "consumer", values) as home, home.start():
            second = run_engine("consumer", kind, kvdepot_transfer(home), bench.hit_then_cold(settle(home=home)))
    rows = {}
    for n in lengths:
        hit, cold = second.sent[f"{HIT}/{n}"], second.sent[f"{COLD}/{n}"]
        rows[n] = {
            "cold_ms": cold.median_ms,
            "handed_over_ms": hit.median_ms,
            "of_cold": median(h / c for h, c in zip(hit.ttft_ms, cold.ttft_ms, strict=True)),
            "hit_tokens": sorted(set(hit.hit_tokens)),
            "same_output": hit.outputs == first.sent[f"{COLD}/{n}"].outputs,
        }
    conditions = {"machine": machine(), "load_average": load_average(), "dtype": arguments.dtype}
    if arguments.json:
        print(json.dumps({"conditions": conditions, "rows": rows}, indent=2))
    else:
        for n, row in rows.items():
            print(
                f"{n} tokens: cold {row['cold_ms']:,.0f} ms, handed over {row['handed_over_ms']:,.0f} ms, "
                f"{row['of_cold']:.1%} of cold, hits {row['hit_tokens']}, "
                f"output {'same' if row['same_output'] else 'DIFFERS'}"
            )
        print("\n".join(f"{name}: {value}" for name, value in conditions.items()))
    return 0 if all(row["same_output"] for row in rows.values()) else 1


def main() -> int:
    """Reads the command line and measures."""
    return run_measurement(parse, measure)


if __name__ == "__main__":
    sys.exit(main())
