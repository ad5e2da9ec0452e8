"""A program in a process group of its own, which logs to a file. The whole group ends with the ``with`` block."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from typing_extensions import Self

GROUP_END_S = 10.0
KILLED_S = 60.0
POLL_S = 0.05
LOG_TAIL_BYTES = 16_384
LOG_TAIL_LINES = 40


class ChildError(Exception):
    """A program ended, or did not become ready; the message has the end of its log."""


class Child:
    """A running program. Its process group includes the processes that it starts, such as an engine's workers."""

    def __init__(self, name: str, command: Sequence[str | Path], log: Path, environ: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self.started_s = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environ},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the program."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the program itself is still running."""
        return self._process.poll() is None

    def check(self) -> None:
        """Returns if the program is running.

        Raises:
            ChildError: it has ended.
        """
        if not self.running:
            raise ChildError(f"{self.name} ended with status {self._process.returncode}\n{self.tail()}")

    def wait_until_ready(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Waits until the program, which has just been started, is ready. Kills it if that fails.

        Raises:
            ChildError: it ended, or the time passed first.
        """
        try:
            self._wait_for(ready, timeout_s)
        except BaseException:
            self.kill()
            raise

    def _wait_for(self, ready: Callable[[], bool], timeout_s: float) -> None:
        while not ready():
            self.check()
            if time.monotonic() - self.started_s > timeout_s:
                raise ChildError(f"{self.name} does not answer after {timeout_s:.0f} s\n{self.tail()}")
            time.sleep(POLL_S)

    def wait(self, timeout_s: float) -> None:
        """Waits until the program has ended successfully.

        Raises:
            ChildError: it failed, or the time passed first.
        """
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ChildError(f"{self.name} did not end within {timeout_s:.0f} s\n{self.tail()}") from None
        if status != 0:
            raise ChildError(f"{self.name} ended with status {status}\n{self.tail()}")

    def wait_for_end(self, timeout_s: float) -> None:
        """Waits until the program itself has ended, successfully or not.

        Raises:
            ChildError: the time passed first.
        """
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ChildError(f"{self.name} did not end within {timeout_s:.0f} s\n{self.tail()}") from None

    def lines(self) -> list[str]:
        """Returns the last non-empty lines of the log."""
        return last_lines(self.log)

    def tail(self) -> str:
        """Returns the end of the log, with its name as the heading."""
        return tail(self.log)

    def kill(self) -> None:
        """Sends SIGKILL to the whole group, and returns when nothing of it is left."""
        end_s = time.monotonic() + GROUP_END_S
        while self._signal(signal.SIGKILL) and time.monotonic() < end_s:
            self._process.poll()
            time.sleep(POLL_S)

    def end(self, timeout_s: float) -> None:
        """Sends SIGTERM to the program and waits for its end, at most so long; then kills what is left of the group."""
        self._process.terminate()
        with suppress(ChildError):
            self.wait_for_end(timeout_s)
        self.kill()

    def _signal(self, number: int) -> bool:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def last_lines(log: Path) -> list[str]:
    """Returns the last non-empty lines of a log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return [line.rstrip() for line in text.splitlines() if line.strip()][-LOG_TAIL_LINES:]


def tail(log: Path) -> str:
    """Returns the end of a log, with its name as the heading."""
    return "\n".join([f"end of {log}:", *last_lines(log)])


def kill_process(pid: int, timeout_s: float = KILLED_S) -> None:
    """Sends SIGKILL to a process that need not be a child, and returns when it has ended.

    Raises:
        TimeoutError: it has not.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if not select.select([process], [], [], timeout_s)[0]:
            raise TimeoutError(f"process {pid} has not ended {timeout_s:.0f} s after SIGKILL")
    finally:
        os.close(process)


def end_within(process: "subprocess.Popen[Any]", timeout_s: float) -> None:
    """Waits for a process that was asked to end; kills it if that takes longer."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_on_signals() -> None:
    """Makes SIGTERM and SIGHUP unwind the stack like Ctrl-C, so that every ``with`` block ends its programs."""

    def unwind(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's signature
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, unwind)
