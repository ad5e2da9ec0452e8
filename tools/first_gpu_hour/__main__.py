"""Runs what this machine can of the first hour on a GPU, and writes one report.

usage: make first-gpu-hour [ARGS="--smoke --only NAME --out FOLDER --driver LIBRARY"]

Every step's output lies beside the report. A step whose need is missing is skipped, and the report says which; so a
machine without a GPU gets a report that says so. The status is 1 when a step failed.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.first_gpu_hour import report
from tools.first_gpu_hour.machine import ROOT, Machine, look
from tools.first_gpu_hour.steps import Step, steps

OUT = ROOT / ".work" / "first-gpu-hour"


def carry_out(step: Step, machine: Machine, folder: Path, number: int) -> dict[str, Any]:
    """Runs a step, or records why not."""
    outcome: dict[str, Any] = {"name": step.name, "tells": step.tells, "command": list(step.command), "seconds": 0.0}
    outcome |= {"outcome": "skipped", "reason": "", "file": "", "status": None, "result": None}
    missing = next(filter(None, map(machine.lacks, step.needs)), "")
    if missing:
        return outcome | {"reason": missing}
    if step.manual:
        return outcome | {"outcome": "manual", "reason": step.manual}
    if step.fresh_cache:
        shutil.rmtree(machine.environ["XDG_CACHE_HOME"], ignore_errors=True)
    file = folder / f"{number:02}-{step.name.replace(' ', '-')}.txt"
    begun = time.monotonic()
    with file.open("w") as errors:
        try:
            done = subprocess.run(
                step.command,
                cwd=ROOT,
                env={**machine.environ, **step.environ},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=step.timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return outcome | {"outcome": "failed", "reason": str(error), "file": file.name}
        errors.write(done.stdout)
    try:
        result = json.loads(done.stdout)
    except ValueError:
        result = None
    failed = done.returncode != 0
    return outcome | {
        "outcome": "failed" if failed else "done",
        "reason": f"status {done.returncode}" if failed else "",
        "status": done.returncode,
        "seconds": round(time.monotonic() - begun, 1),
        "file": file.name,
        "result": result,
    }


def main() -> int:
    """Runs all steps and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small sizes, whose figures mean nothing")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only this step; may be repeated")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="where the report is written")
    parser.add_argument("--driver", type=Path, metavar="LIBRARY", help="another libcuda.so.1 than the machine's")
    arguments = parser.parse_args()
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    machine = look(arguments.driver, folder / "cache")
    wanted = [step for step in steps(smoke=arguments.smoke) if not arguments.only or step.name in arguments.only]
    outcomes = []
    for number, step in enumerate(wanted, 1):
        print(f"{number} of {len(wanted)}: {step.name}", file=sys.stderr)
        outcomes.append(carry_out(step, machine, folder, number))
    whole = report.report(machine, outcomes)
    report.write(folder, whole)
    print("\n".join(report.lines(whole)))
    print(f"\n{folder / 'report.txt'}")
    return int(any(one["outcome"] == "failed" for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
