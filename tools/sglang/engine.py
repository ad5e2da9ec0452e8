"""Real SGLang with HiCache over kvdepot, asked round by round from another process."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tools.lab.child import POLL_S, ChildError, tail

ROUND_S = 240.0
FLUSH_S = 30.0
ROOT = Path(__file__).resolve().parents[2]
STANDIN = ROOT / "tests" / "with_sglang" / "standin"


def depot_backend(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's arguments for kvdepot as HiCache's storage backend."""
    named = {
        "backend_name": "kvdepot",
        "module_path": "kvdepot.engines.sglang",
        "class_name": "KVDepotHiCache",
        "interface_v1": 1,
        **extra_config,
    }
    return {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config": json.dumps(named)}


class Engine:
    """A running SGLang, with its own arguments beside those of the tests."""

    def __init__(self, root: Path, model: str, arguments: Mapping[str, Any], **environ: str) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.log = root / "sglang.log"
        paths = [str(STANDIN), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.sglang.engine_child", model, json.dumps(dict(arguments))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environ},
                start_new_session=True,
            )
        self._rest = b""

    def ask(self, seed: int, count: int, tokens: int) -> dict[str, Any]:
        """Answers to ``count`` prompts of so many tokens, and how many tokens of each were found and where.

        Raises:
            ChildError: SGLang ended, or does not answer.
        """
        return self._round({"seed": seed, "count": count, "tokens": tokens})

    def flush(self) -> None:
        """Empties SGLang's own caches, in the device's memory and in the host's.

        SGLang answers before it is through with a request, and refuses until then.

        Raises:
            ChildError: it refuses for too long, or ended.
        """
        end_s = time.monotonic() + FLUSH_S
        while not self._round({"flush": True})["flushed"]:
            if time.monotonic() > end_s:
                raise ChildError(f"SGLang has not flushed its caches\n{tail(self.log)}")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL to SGLang and all that it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _round(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        while True:
            line = self._line()
            if line.startswith("ROUND "):
                found: dict[str, Any] = json.loads(line.removeprefix("ROUND "))
                return found

    def _line(self) -> str:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            readable, _, _ = select.select([descriptor], [], [], ROUND_S)
            more = os.read(descriptor, 1 << 16) if readable else b""
            if not more:
                raise ChildError(f"SGLang ended, or says nothing for {ROUND_S:.0f} s\n{tail(self.log)}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
