"""A process that is stopped for a while, as a debugger or a frozen container stops it."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STOP_S = 60.0
POLL_S = 0.001


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Stops a process; it goes on when the context ends."""
    pause(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def pause(pid: int) -> None:
    """Stops a process, and returns when none of its threads runs any more.

    SIGSTOP takes effect only when a thread of the process is scheduled. Until then the other threads still answer.

    Raises:
        ValueError: ``pid`` is not that of one process; 0 would stop the caller's own process group.
        ProcessLookupError: there is no such process.
        TimeoutError: a thread still runs after 60 s.
    """
    if pid <= 0:
        raise ValueError(f"{pid} is not the number of a process")
    os.kill(pid, signal.SIGSTOP)
    end_s = time.monotonic() + STOP_S
    while running := [state for state in _states(pid) if state not in "Tt"]:
        if time.monotonic() > end_s:
            raise TimeoutError(f"threads of process {pid} are not stopped after {STOP_S:.0f} s: {running}")
        time.sleep(POLL_S)


def _states(pid: int) -> list[str]:
    """Returns the state of each thread, as in /proc/PID/stat."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            stat = (thread / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            # The thread has ended.
            continue
        # The name before the state may contain spaces and parentheses.
        found.append(stat.rpartition(")")[2].split()[0])
    return found
