"""A process group seen through /proc: its processes, and their named shared memory.

vLLM's ranks communicate through files in /dev/shm, and leave them behind when they are killed.
"""

import os
from pathlib import Path

PROC = Path("/proc")
SHARED = Path("/dev/shm")


def members(group: int) -> list[int]:
    """Returns the living processes of the group, oldest first as far as their ids tell."""
    found = []
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == group:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return sorted(found)


def workers(group: int) -> list[int]:
    """Returns children of the group's leader with a program of their own kind: an engine's ranks, not helpers."""
    return [pid for pid in members(group) if _parent(pid) == group and "resource_tracker" not in _read(pid, "cmdline")]


def named_memory(group: int) -> set[Path]:
    """Returns files in /dev/shm that processes of the group have mapped."""
    lines = [line for pid in members(group) for line in _read(pid, "maps").splitlines() if f" {SHARED}/" in line]
    # The kernel appends " (deleted)" to the name of a file that is already unlinked.
    return {Path(line.split(maxsplit=5)[-1]) for line in lines if not line.endswith(" (deleted)")}


def _parent(pid: int) -> int:
    found = [line.split()[1] for line in _read(pid, "status").splitlines() if line.startswith("PPid:")]
    return int(found[0]) if found else 0


def _read(pid: int, name: str) -> str:
    """Returns a file of the process; empty if it has ended in the meantime."""
    try:
        return (PROC / str(pid) / name).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
