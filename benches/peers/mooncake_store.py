"""Mooncake's master and one holder of memory, as processes."""

import socket
import time
from contextlib import ExitStack
from pathlib import Path

from typing_extensions import Self

from benches.peers.lab import Environment, Process
from benches.peers.work import Shape
from tools.lab.child import POLL_S, Child, ChildError
from tools.lab.ports import LOOPBACK, free_port

START_S = 60.0


class MooncakeStore:
    """A running store whose holder gives ``nbytes`` of its memory."""

    def __init__(self, environment: Environment, nbytes: int, logs: Path) -> None:
        self._stack = ExitStack()
        with ExitStack() as stack:
            self.master = self._start_master(stack, environment, logs)
            settings = {"master": self.master, "segment_bytes": nbytes}
            # It only holds memory: its own blocks are none that anybody moves.
            stack.enter_context(Process("benches.peers.mooncake_side", Shape(4, 1, 1), settings, logs, environment))
            self._stack = stack.pop_all()

    @staticmethod
    def _start_master(stack: ExitStack, environment: Environment, logs: Path) -> str:
        port = free_port()
        command: list[str | Path] = [
            environment.root / "bin" / "mooncake_master",
            f"--rpc_port={port}",
            f"--metrics_port={free_port()}",
            f"--rpc_address={LOOPBACK}",
        ]
        log = logs / "mooncake_master.log"
        master = stack.enter_context(Child("Mooncake's master", command, log, environment.variables))
        end_s = time.monotonic() + START_S
        while True:
            master.check()
            try:
                socket.create_connection((LOOPBACK, port), 1).close()
            except OSError as error:
                if time.monotonic() > end_s:
                    raise ChildError(f"{master.name} does not answer after {START_S:.0f} s\n{master.tail()}") from error
                time.sleep(POLL_S)
                continue
            return f"{LOOPBACK}:{port}"

    def __enter__(self) -> Self:
        """Returns the store, which ends with the ``with`` block."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Ends it."""
        self._stack.close()
