"""Measures what packs save: dumps to a bucket, and loads by a depot that never saw the blocks, with packs and without.

The bucket is a real S3 server (versitygw) on this machine, so a request costs processor time and hardly any waiting.
Each round has a bucket and two depots of its own for each case; the cases take turns. Requests are those that the
depots count.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import kvdepot
from tools.lab.bucket import NAME, object_options, write_credentials
from tools.lab.child import POLL_S, Child, ChildError
from tools.lab.depot import Depot, DepotHome
from tools.lab.machine import load_average, machine
from tools.lab.models import WORK
from tools.lab.ports import LOOPBACK, free_port
from tools.lab.program import run_program
from tools.lab.progress import Progress

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
KEYS = ("bench", "secret")
START_S, SETTLE_S, CALL_MS, TASK_MS = 60.0, 300.0, 10_000, 120_000
REQUESTS = ("put", "get", "head", "list")


@dataclass(frozen=True)
class Row:
    """A case of one round. Rates are in bytes per second; requests are those of both depots."""

    block_bytes: int
    pack_mb: int
    dump_rate: float
    load_rate: float
    requests: dict[str, int]
    load_average: float


class Server:
    """A real S3 server with one empty bucket."""

    def __init__(self, root: Path) -> None:
        (root / "buckets" / NAME).mkdir(parents=True)
        port = free_port()
        program, listen = os.environ["KVDEPOT_TEST_S3"], f"{LOOPBACK}:{port}"
        command: list[str | Path] = [program, "--quiet", "--port", listen, "posix", root / "buckets"]
        environ = dict(zip(("ROOT_ACCESS_KEY", "ROOT_SECRET_KEY"), KEYS, strict=True))
        self._child = Child("the S3 server", command, root / "log", environ)
        write_credentials(root / "credentials", *KEYS)
        self.options = object_options(f"http://{LOOPBACK}:{port}", root / "credentials")

    def end(self) -> None:
        """Kills it."""
        self._child.kill()


class Bench:
    """Runs the cases on the same blocks."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._total = arguments.mib * MIB
        self._root = WORK / "bench-bucket"

    def row(self, block_bytes: int, pack_mb: int) -> Row:
        """Measures a case in an empty bucket."""
        shutil.rmtree(self._root, ignore_errors=True)
        count = self._total // block_bytes
        blocks = [np.random.default_rng(n).integers(0, 256, block_bytes, dtype=np.uint8) for n in range(count)]
        names = [n.to_bytes(16, "big") for n in range(count)]
        server = Server(self._root / "s3")
        values = {
            "pipeline": "Cache|Object",
            "directories": None,
            "pool_gb": round(2 * self._total / GIB + 0.25, 2),
            "timeout_ms": TASK_MS,
            "object_pack_mb": pack_mb,
            **server.options,
        }
        try:
            with self._depot("writer", values, block_bytes) as (depot, store):
                began = time.monotonic()
                store.dump(names, [[block] for block in blocks]).wait().raise_for_failures()
                depot.wait_until_clean(SETTLE_S)
                dump_s = time.monotonic() - began
                requests = requests_of(depot)
            into = [np.zeros(block_bytes, dtype=np.uint8) for _ in names]
            with self._depot("reader", values, block_bytes) as (depot, store):
                wait_until(lambda: store.lookup_on_prefix(names) == count, "the other depot does not find the blocks")
                began = time.monotonic()
                store.load(names, [[one] for one in into]).wait().raise_for_failures()
                load_s = time.monotonic() - began
                requests = {name: requests[name] + more for name, more in requests_of(depot).items()}
        finally:
            server.end()
        if any((one != block).any() for one, block in zip(into, blocks, strict=True)):
            raise ChildError("a block came with other bytes")
        total = count * block_bytes
        return Row(block_bytes, pack_mb, total / dump_s, total / load_s, requests, load_average())

    @contextmanager
    def _depot(self, name: str, values: dict[str, Any], block_bytes: int) -> Iterator[tuple[Depot, kvdepot.Store]]:
        with DepotHome(self._root / name, values) as home, home.start() as depot:
            config = {
                "mode": "node",
                "socket": str(home.socket),
                "start_depot": False,
                "timeout_ms": TASK_MS,
                "call_timeout_ms": CALL_MS,
            }
            store = kvdepot.open(config, layout=[block_bytes], namespace={"model": "bench"})
            try:
                yield depot, store
            finally:
                store.close()


def wait_until(is_so: Callable[[], bool], otherwise: str) -> None:
    """Waits for another process."""
    end_s = time.monotonic() + START_S
    while not is_so():
        if time.monotonic() > end_s:
            raise ChildError(f"{otherwise} within {START_S:.0f} s")
        time.sleep(POLL_S)


def requests_of(depot: Depot) -> dict[str, int]:
    """Returns how many requests a depot has sent to its bucket."""
    (tier,) = (depot.stats() or {"tiers": [{}]})["tiers"]
    return {name: int(tier.get(f"{name}_requests", 0)) for name in REQUESTS}


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 256, 1024], help="block sizes; default: 64 256 1024")
    parser.add_argument("--mib", type=int, default=192, help="MiB of blocks in each case, default 192")
    parser.add_argument("--pack-mb", type=int, default=8, help="object_pack_mb of the case with packs, default 8")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.mib < 1 or min(arguments.kib) < 4:
        parser.error("needs at least a round, a MiB and blocks of 4 KiB")
    return arguments


def measure(arguments: argparse.Namespace, progress: Progress) -> int:
    """Measures everything and prints it."""
    if not os.environ.get("KVDEPOT_TEST_S3"):
        raise ChildError("KVDEPOT_TEST_S3 names no S3 server: run make bench-bucket")
    bench, rows = Bench(arguments), list[Row]()
    for number in range(arguments.rounds):
        for kib in arguments.kib:
            for pack_mb in (0, arguments.pack_mb):
                with progress.step(f"round {number + 1}: blocks of {kib} KiB, object_pack_mb {pack_mb}"):
                    rows.append(bench.row(kib * KIB, pack_mb))
    if arguments.json:
        print(json.dumps({"machine": machine(), "mib": arguments.mib, "rows": [vars(row) for row in rows]}, indent=2))
        return 0
    print(f"{arguments.mib} MiB; {machine()['cores']} cores; medians of {arguments.rounds}; packs beside none")
    print(f"{'KiB':>6}{'dump MiB/s':>14}{'ratio':>7}{'load MiB/s':>14}{'ratio':>7}   requests ({', '.join(REQUESTS)})")
    for kib in arguments.kib:
        of = {
            pack_mb: [row for row in rows if (row.block_bytes, row.pack_mb) == (kib * KIB, pack_mb)]
            for pack_mb in (0, arguments.pack_mb)
        }
        print(line(kib, of[0], of[arguments.pack_mb]))
    print(f"load average at the end: {rows[-1].load_average}")
    return 0


def line(kib: int, plain: list[Row], packed: list[Row]) -> str:
    """Returns a block size's line."""

    def both(rate: Callable[[Row], float]) -> str:
        without, with_packs = (median(rate(row) for row in rows) for rows in (plain, packed))
        ratio = median(rate(two) / rate(one) for one, two in zip(plain, packed, strict=True))
        return f"{f'{with_packs / MIB:.0f} / {without / MIB:.0f}':>14}{ratio:>7.2f}"

    def counts(rows: list[Row]) -> str:
        return " ".join(str(int(median(row.requests[name] for row in rows))) for name in REQUESTS)

    dumps, loads = both(lambda row: row.dump_rate), both(lambda row: row.load_rate)
    return f"{kib:>6}{dumps}{loads}   {counts(packed)} / {counts(plain)}"


if __name__ == "__main__":
    sys.exit(run_program(lambda progress: measure(parse(), progress)))
