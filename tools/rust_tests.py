"""Runs the Rust tests, several test programs at a time: most of them wait more than they compute.

Run as ``rust_tests.py``; it needs cargo and nothing else. ``cargo test`` runs one program after another. A program's
output is shown when it ends: one line if it succeeds, everything if it fails. RUST_TEST_THREADS is the number of tests
that a program runs at a time, as for ``cargo test``; by default two for each processor.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

PROGRAM_S = 1200
RESULT = re.compile(rb"^test result: \w+\. (\d+ passed; \d+ failed)", re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """A test program, and the directory of its package, where it runs."""

    path: Path
    package: Path

    @property
    def name(self) -> str:
        """Its package and target."""
        return f"{self.package.name}: {self.path.name.rpartition('-')[0]}"


@dataclass(frozen=True)
class Ended:
    """What came of a program. ``status`` is negative for a signal."""

    program: Program
    status: int
    output: bytes
    seconds: float

    def told(self) -> str:
        """Returns the line for people, and the output of a program that failed."""
        counts = RESULT.search(self.output)
        said = counts[1].decode() if counts else "no result"
        line = f"  {self.program.name:<34} {self.seconds:4.0f} s  {said}"
        if self.status == 0:
            return line
        return f"{line}\n{self.output.decode(errors='replace')}\n{self.program.path} ended with status {self.status}"


def programs(messages: str) -> list[Program]:
    """Returns the test programs that cargo's messages name, the largest first: it is mostly the longest."""
    found = []
    for line in messages.splitlines():
        message = json.loads(line)
        if message.get("executable") and message.get("profile", {}).get("test"):
            found.append(Program(Path(message["executable"]), Path(message["manifest_path"]).parent))
    return sorted(found, key=lambda program: program.path.stat().st_size, reverse=True)


def run(program: Program, environ: Mapping[str, str], timeout_s: float) -> Ended:
    """Runs a program to its end. One that takes longer than ``timeout_s`` is killed."""
    began_s = time.monotonic()
    environ = {**environ, "CARGO_MANIFEST_DIR": str(program.package)}
    with subprocess.Popen(
        [program.path, "--quiet"],
        cwd=program.package,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as late:
            # Processes that it has started may keep the pipe open: nothing more is read.
            process.kill()
            process.wait()
            output = (late.output or b"") + f"\nkilled after {timeout_s:.0f} s\n".encode()
    return Ended(program, process.returncode, output, time.monotonic() - began_s)


def run_all(
    chosen: Sequence[Program],
    environ: Mapping[str, str],
    jobs: int,
    say: Callable[[str], None],
    timeout_s: float = PROGRAM_S,
) -> list[Program]:
    """Runs programs, ``jobs`` at a time. Returns those that failed."""
    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run, program, environ, timeout_s) for program in chosen]):
            ended = future.result()
            say(ended.told())
            if ended.status != 0:
                failed.append(ended.program)
    return failed


def main() -> int:
    """Runs the tests of the workspace, and those in its documentation."""
    build = ["cargo", "test", "--workspace", "--quiet", "--no-run", "--message-format=json"]
    built = subprocess.run(build, check=False, stdout=subprocess.PIPE, text=True)
    if built.returncode != 0:
        return built.returncode
    processors = len(os.sched_getaffinity(0))
    environ = {"RUST_TEST_THREADS": str(2 * processors), **os.environ}
    failed = run_all(programs(built.stdout), environ, processors + 1, lambda text: print(text, flush=True))
    documented = subprocess.run(["cargo", "test", "--workspace", "--quiet", "--doc"], check=False).returncode
    if failed:
        print("failed: " + ", ".join(program.name for program in failed))
    return 1 if failed else documented


if __name__ == "__main__":
    sys.exit(main())
