"""A depot over pool servers, in a separate process, run by the interpreter that has kvdepot."""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tools.lab.child import POLL_S, end_within
from tools.wire.servers import ROOT, NoServerError, Server

CALL_S = 120.0
END_S = 20.0
POOL_GB = 0.25
# Silence of a server that is alive: a busy machine must not reach it.
TIMEOUT_MS = 60_000


class DepotError(Exception):
    """The depot's process raised an exception, or did not answer."""


def interpreter() -> str:
    """Returns the interpreter that has kvdepot."""
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        raise NoServerError(f"no {python}: run make setup")
    return str(python)


class Depot:
    """``Cache|Remote`` over servers. Blocks are identified by numbers, which determine their bytes."""

    def __init__(self, servers: Sequence[Server], *, layer_bytes: int = 64 << 10, **settings: object) -> None:
        here, there = Pipe()
        self._calls = here
        self._process = subprocess.Popen(
            [interpreter(), "-m", "tools.wire.depot_child", str(there.fileno())],
            pass_fds=[there.fileno()],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
        )
        there.close()
        config = {
            "pipeline": "Cache|Remote",
            "pool_gb": POOL_GB,
            "log_level": "error",
            "remote_servers": [server.address for server in servers],
            "remote_timeout_ms": TIMEOUT_MS,
            **settings,
        }
        try:
            self._call("open", config, layer_bytes)
        except BaseException:
            self.close()
            raise

    def send(self, name: str, *arguments: object) -> None:
        """Starts a call."""
        self._calls.send((name, arguments))

    def receive(self, name: str) -> Any:
        """Returns the result of the call.

        Raises:
            DepotError: it raised, or did not return.
        """
        if not self._calls.poll(CALL_S):
            raise DepotError(f"{name} did not come back within {CALL_S:.0f} s")
        try:
            done, value = self._calls.recv()
        except EOFError:
            raise DepotError(f"{name} ended the depot with status {self._process.wait(END_S)}") from None
        if not done:
            raise DepotError(": ".join(value))
        return value

    def _call(self, name: str, *arguments: object) -> Any:
        self.send(name, *arguments)
        return self.receive(name)

    def dump(self, numbers: Sequence[int]) -> bool:
        """Dumps blocks. Returns whether the tiers were written, or had failed, in time."""
        return bool(self._call("dump", list(numbers)))

    def load(self, numbers: Sequence[int]) -> list[str]:
        """Loads blocks. Returns for each ``whole``, ``missing`` or ``wrong``."""
        states: list[str] = self._call("load", list(numbers))
        return states

    def lookup(self, numbers: Sequence[int]) -> list[bool]:
        """Returns for each block whether it is present."""
        there: list[bool] = self._call("lookup", list(numbers))
        return there

    def reset(self) -> None:
        """Drops all blocks."""
        self._call("reset")

    def stats(self) -> dict[str, Any]:
        """Returns the depot's counters."""
        stats: dict[str, Any] = self._call("stats")
        return stats

    def servers(self) -> list[dict[str, Any]]:
        """Returns the state of the servers, as the depot sees them."""
        servers: list[dict[str, Any]] = self.stats()["tiers"][0]["servers"]
        return servers

    def until(self, holds: Callable[[Self], bool]) -> None:
        """Waits until a condition holds."""
        end_s = time.monotonic() + CALL_S
        while not holds(self):
            if time.monotonic() > end_s:
                raise DepotError(f"it never came to pass: {self.stats()}")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Ends the process, which exits once it has no caller."""
        self._calls.close()
        end_within(self._process, END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
