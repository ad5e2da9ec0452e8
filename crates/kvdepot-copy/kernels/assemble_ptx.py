#!/usr/bin/env python3
"""Assembles kvcopy_80.ptx for every architecture that is supported, as a driver does when it loads it. Needs no device.

usage: assemble_ptx.py [PTXAS]

PTXAS is the assembler of a CUDA toolkit; left out, the one that `make ptx-check` installs, or the first in the path. A
kernel that spills registers, or needs more of them than a multiprocessor has for its threads, is an error.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PTX = HERE / "kvcopy_80.ptx"
INSTALLED = HERE.parents[2] / ".work" / "ptxas" / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
ARCHITECTURES = (80, 86, 87, 89, 90, 100, 103, 120, 121)
THREADS = {"kvdepot_copy": 2 * 256, "kvdepot_burn": 1024}
"""Threads of a kernel that must find room on one multiprocessor."""
REGISTERS = 65_536
"""Of a multiprocessor."""
ASSEMBLE_S = 120

FUNCTION = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")


def find(arguments: list[str]) -> str | None:
    """The assembler."""
    if arguments:
        return arguments[0]
    return str(INSTALLED) if INSTALLED.is_file() else shutil.which("ptxas")


def assemble(ptxas: str, architecture: int) -> dict[str, int]:
    """Registers of each kernel."""
    command = [ptxas, "-v", "-warn-spills", f"-arch=sm_{architecture}", "-o", "/dev/null", str(PTX)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ASSEMBLE_S, check=False)
    said = done.stdout + done.stderr
    if done.returncode:
        raise SystemExit(f"{PTX.name} cannot be assembled for sm_{architecture}:\n{said}")
    registers: dict[str, int] = {}
    kernel = ""
    for line in said.splitlines():
        if found := FUNCTION.search(line):
            kernel = found[1]
        elif (found := SPILLS.search(line)) and (found[1], found[2]) != ("0", "0"):
            raise SystemExit(f"{kernel or 'a kernel'} spills registers on sm_{architecture}: {line.strip()}")
        elif found := USED.search(line):
            registers[kernel] = int(found[1])
    if registers.keys() != THREADS.keys():
        raise SystemExit(f"sm_{architecture}: ptxas spoke of {sorted(registers)}, not of {sorted(THREADS)}:\n{said}")
    for name, threads in THREADS.items():
        if registers[name] * threads > REGISTERS:
            raise SystemExit(f"sm_{architecture}: {name} needs {registers[name]} registers a thread, too many")
    return registers


def main() -> None:
    """Assembles for all architectures."""
    ptxas = find(sys.argv[1:])
    if ptxas is None:
        raise SystemExit("ptxas is not there: run make ptx-check, which installs it, or name one")
    for architecture in ARCHITECTURES:
        registers = assemble(ptxas, architecture)
        print(f"sm_{architecture}: " + ", ".join(f"{name} {count} registers" for name, count in registers.items()))


if __name__ == "__main__":
    main()
