"""An engine forked by ``tools.lab.warm`` that answers batches of prompts (``tools.lab.victim``), seen from outside."""

import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tools.lab.warm import Fork, Warm

ANSWER_S = 120.0
POLL_S = 0.02


class WrongError(Exception):
    """An engine misbehaved."""


class ForkedEngine:
    """The engine and the socket to it."""

    def __init__(self, warm: Warm, root: Path, plan: dict[str, Any], name: str, *, answer_s: float = ANSWER_S) -> None:
        """Forks it; ``answer_s`` is how long a start or an answer may take."""
        self._answer_s = answer_s
        address = root / f"{name}.sock"
        address.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen(1)
        self._listener.settimeout(POLL_S)
        self.log = root / f"{name}.log"
        self.fork: Fork = warm.start("tools.lab.victim", {**plan, "address": str(address)}, self.log, {}, root)
        self._connection: Connection | None = None

    def ready(self) -> bool:
        """Waits until the engine has started. Returns false if it died first.

        Raises:
            WrongError: it neither started nor died.
        """
        end_s = time.monotonic() + self._answer_s
        while self._connection is None:
            try:
                self._connection = Connection(self._listener.accept()[0].detach())
            except TimeoutError:
                if self._ended():
                    return False
            if time.monotonic() > end_s:
                raise WrongError(f"the engine has not started within {self._answer_s:.0f} s; its log is {self.log}")
        return bool(self._receive() == "ready")

    def _ended(self) -> bool:
        try:
            self.fork.wait(0)
        except TimeoutError:
            return False
        return True

    def ask(self, order: dict[str, Any]) -> dict[str, Any] | None:
        """Sends an order (``tools.lab.victim``) and waits for the answer; None if the engine died meanwhile."""
        assert self._connection is not None
        try:
            self._connection.send(order)
        except OSError:
            return None
        found: dict[str, Any] | None = self._receive()
        return found

    def _receive(self) -> Any:
        assert self._connection is not None
        try:
            if not self._connection.poll(self._answer_s):
                raise WrongError(f"the engine has not answered within {self._answer_s:.0f} s; its log is {self.log}")
            return self._connection.recv()
        except (EOFError, ConnectionError):
            return None

    def stop(self) -> None:
        """Lets the engine exit normally.

        Raises:
            WrongError: it exited with an error.
        """
        assert self._connection is not None
        self._connection.close()
        status = self.fork.wait(self._answer_s)
        if status != 0:
            raise WrongError(f"the engine has ended with status {status}; its log is {self.log}")

    def close(self) -> None:
        """Ends everything of the engine that is left."""
        self.fork.end()
        if self._connection is not None:
            self._connection.close()
        self._listener.close()
