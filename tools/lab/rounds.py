"""A program queried round by round: a line of JSON in, a line ``ROUND`` with JSON out. Other lines are ignored."""

import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tools.lab.child import ChildError, tail

ROUND_S = 240.0
ROOT = Path(__file__).resolve().parents[2]


class Rounds:
    """A running program in a session of its own, shared with its children. Its errors are appended to ``log``."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, **environ},
                start_new_session=True,
            )
        self._rest = b""

    def round(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the program's answer.

        Raises:
            ChildError: it ended, or does not answer.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        while True:
            line = self._line()
            if line.startswith("ROUND "):
                found: dict[str, Any] = json.loads(line.removeprefix("ROUND "))
                return found

    def end(self, timeout_s: float) -> None:
        """Closes standard input, which ends the program, and waits at most so long; then kills what is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """Sends SIGKILL to the program and everything that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            readable, _, _ = select.select([descriptor], [], [], ROUND_S)
            more = os.read(descriptor, 1 << 16) if readable else b""
            if not more:
                raise ChildError(f"{self.name} ended, or says nothing for {ROUND_S:.0f} s\n{tail(self.log)}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
