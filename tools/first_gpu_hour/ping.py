"""How long one copy of 4 KiB each way, and one allocation, take; alone, or as long as another program runs beside it.

usage: python -m tools.first_gpu_hour.ping [--device N] [--count N] [--beside COMMAND ...]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

from tools.first_gpu_hour.cuda import Cuda

BYTES = 4096
SAMPLES_MAX = 1_000_000


def quantiles(samples_s: list[float]) -> dict[str, float]:
    """Returns quantiles in microseconds."""
    ascending = sorted(samples_s)
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
    found = {name: ascending[min(len(ascending) - 1, int(part * len(ascending)))] for name, part in at.items()}
    return {f"{name}_us": round(value * 1e6, 1) for name, value in {**found, "max": ascending[-1]}.items()}


def timed(work: Callable[[], None]) -> float:
    """Returns how long ``work`` takes, in seconds."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> int:
    """Prints JSON. The exit status is that of the program beside it, if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--beside", nargs=argparse.REMAINDER, default=[])
    arguments = parser.parse_args()
    cuda = Cuda(arguments.device, BYTES)
    kinds = {"to_device": cuda.to_device, "to_host": cuda.to_host, "allocate": cuda.allocate}
    samples: dict[str, list[float]] = {name: [] for name in kinds}
    beside = subprocess.Popen(arguments.beside, stdout=subprocess.DEVNULL) if arguments.beside else None
    count = 0
    while count < arguments.count or (beside is not None and beside.poll() is None and count < SAMPLES_MAX):
        for name, work in kinds.items():
            samples[name].append(timed(work))
        count += 1
    status = beside.wait() if beside is not None else 0
    print(json.dumps({"count": count, **{name: quantiles(of_kind) for name, of_kind in samples.items()}}))
    sys.stdout.flush()
    # A driver's threads do not need an orderly exit of this program.
    os._exit(1 if status else 0)


if __name__ == "__main__":
    main()
