"""Measures kvdepot beside other stores: ratios of one run, every loaded byte compared.

Each side of a comparison stores and loads the same blocks in processes of its own, round by round, in alternating
order. "times the best peer" is the median of the ratios of a round: kvdepot to the side of others that was best in
it. A side whose program is not installed is reported, and left out.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benches.peers.comparison import Comparison
from benches.peers.dax import Dax
from benches.peers.files import Files
from benches.peers.lab import Place
from benches.peers.mooncake import Mooncake
from benches.peers.results import Results
from benches.peers.slab import Slab
from benches.peers.ucm import Ucm
from kvdepot import _native
from tools.lab.child import ChildError
from tools.lab.machine import load_average, machine
from tools.lab.models import WORK
from tools.lab.program import run_program
from tools.lab.progress import Progress
from tools.wire.servers import NoServerError

COMPARISONS: tuple[type[Comparison], ...] = (Ucm, Dax, Slab, Files, Mooncake)
MEMORY = Path("/dev/shm")


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [one.name for one in COMPARISONS]
    parser.add_argument("--only", choices=names, action="append", help="run this comparison; again for more")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each comparison, default 3")
    parser.add_argument("--directory", type=Path, default=WORK, help="on the disk to measure, default %(default)s")
    parser.add_argument("--smoke", action="store_true", help="small blocks, one round: the figures mean nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("needs at least one round")
    return arguments


def versions_of(comparisons: list[Comparison]) -> dict[str, str | None]:
    """Returns the versions of all sides; None for what is not there."""
    programs = {program.name: program.version for one in comparisons for program in one.programs()}
    return {"kvdepot": _native.__version__, **programs}


def measure(arguments: argparse.Namespace, progress: Progress) -> int:
    """Runs the comparisons and prints them. A wrong block of ours is a failure."""
    arguments.directory.mkdir(parents=True, exist_ok=True)
    disk = Path(tempfile.mkdtemp(dir=arguments.directory.absolute(), prefix="bench-peers-"))
    memory = Path(tempfile.mkdtemp(dir=MEMORY, prefix="kvdepot-bench-peers-"))
    logs = Path(tempfile.mkdtemp(prefix="kvdepot-bench-peers-logs-"))
    try:
        chosen = [one for one in COMPARISONS if arguments.only is None or one.name in arguments.only]
        comparisons = [one(Place(disk, memory, logs)) for one in chosen]
        rounds = 1 if arguments.smoke else arguments.rounds
        found: dict[str, Results] = {}
        loads = {"at first": load_average()}
        for one in comparisons:
            with progress.step(one.title, one.doing):
                found[one.name] = one.run(rounds, smoke=arguments.smoke, note=progress.note)
            loads[one.name] = load_average()
    finally:
        shutil.rmtree(disk, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    shutil.rmtree(logs, ignore_errors=True)
    missing = {one.name: reason for one in comparisons if (reason := one.left_out()) is not None}
    report = {
        "machine": machine(),
        "load_average": loads,
        "versions": versions_of(comparisons),
        "missing": missing,
        "comparisons": {name: list(results.rows()) for name, results in found.items()},
    }
    print_report(report, found, as_json=arguments.json)
    wrong = list(wrong_of_ours(found))
    for text in wrong:
        progress.failure(text)
    return int(bool(wrong))


def wrong_of_ours(found: Mapping[str, Results]) -> Iterator[str]:
    """Yields where kvdepot loaded wrong bytes."""
    for name, results in found.items():
        for row in results.rows():
            if row["side"] not in results.peers and row.get("wrong"):
                yield f"{name}: {row['case']}: {row['side']} loaded {row['wrong']} wrong blocks"


def print_report(report: dict[str, Any], found: dict[str, Results], *, as_json: bool) -> None:
    """Prints everything as JSON, or as tables with the conditions below them."""
    if as_json:
        print(json.dumps(report, indent=2))
        return
    for results in found.values():
        results.print()
    for name in ("machine", "load_average", "versions"):
        print(f"{name}: {report[name]}")
    for name, reason in report["missing"].items():
        print(f"{name}: left out: {reason}")


def main() -> int:
    """Reads the command line and measures."""
    arguments = parse()
    return run_program(lambda progress: measure(arguments, progress), (ChildError, NoServerError, OSError))


if __name__ == "__main__":
    sys.exit(main())
