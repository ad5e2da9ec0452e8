"""A depot, and two processes that attach to it with a store on a device: both register its pool with their driver.

usage: python -m tools.first_gpu_hour.attach [--device N] [--pool-gib N] [--stay-s N]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 2
ATTACH_MS = 60_000
END_S = 60


def rank(socket: str, ordinal: int, stay_s: float) -> None:
    """Attaches, reports how long that took, and stays for a while."""
    from kvdepot._native import Depot

    begun = time.perf_counter()
    depot = Depot.connect(socket, None, wait_ms=ATTACH_MS)
    namespace = depot.open_namespace(json.dumps({"first_gpu_hour": 1}), "[[1, [4096]]]")
    copy = {"cuda_device": ordinal, "copy_engine": "batch"}
    store = depot.store(namespace, copy_json=json.dumps(copy))
    print(f"attached in {time.perf_counter() - begun:.3f} s", file=sys.stderr)
    time.sleep(stay_s)
    store.close()
    depot.close()


def main() -> int:
    """Runs all processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--pool-gib", type=float, default=64)
    parser.add_argument("--stay-s", type=float)
    parser.add_argument("--rank", metavar="SOCKET", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # Half a second per GiB covers pinning and its pauses.
    stay_s = arguments.pool_gib / 2 if arguments.stay_s is None else arguments.stay_s
    if arguments.rank:
        rank(arguments.rank, arguments.device, stay_s)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        socket = str(Path(directory) / "depot.sock")
        core = json.dumps({"pipeline": "Cache", "pool_bytes": int(arguments.pool_gib * (1 << 30))})
        depot = subprocess.Popen([sys.executable, "-m", "kvdepot", "serve", "--core-json", core, "--socket", socket])
        try:
            again = [sys.executable, "-m", "tools.first_gpu_hour.attach", "--rank", socket]
            options = [
                "--device",
                str(arguments.device),
                "--stay-s",
                str(stay_s),
                "--pool-gib",
                str(arguments.pool_gib),
            ]
            ranks = [subprocess.Popen([*again, *options]) for _ in range(RANKS)]
            return max(process.wait() for process in ranks)
        finally:
            depot.terminate()
            depot.wait(END_S)


if __name__ == "__main__":
    sys.exit(main())
