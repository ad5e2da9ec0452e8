"""Real vLLM that looks for prefixes in LMCache's server, asked round by round from another process."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tools.lab.child import ChildError, tail

ROUND_S = 240.0
ROOT = Path(__file__).resolve().parents[2]


class Engine:
    """A running vLLM; ``port`` is that of LMCache's server, 0 = without."""

    def __init__(self, root: Path, model: str, port: int) -> None:
        self._log = root / f"vllm-{port}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.lmcache.vllm_child", model, str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
        self._rest = b""

    def ask(self, seed: int, count: int, tokens: int) -> dict[str, Any]:
        """Answers to ``count`` prompts of so many tokens, and how many tokens of each were found.

        Raises:
            ChildError: vLLM ended, or does not answer.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"seed": seed, "count": count, "tokens": tokens}).encode() + b"\n")
        self._process.stdin.flush()
        while True:
            line = self._line()
            if line.startswith("ROUND "):
                found: dict[str, Any] = json.loads(line.removeprefix("ROUND "))
                return found

    def kill(self) -> None:
        """SIGKILL to vLLM and all that it has started."""
        if self._process.poll() is None:
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
                raise ChildError(f"vLLM ended, or says nothing for {ROUND_S:.0f} s\n{tail(self._log)}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
