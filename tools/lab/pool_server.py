"""A pool server as a process of its own: a depot whose wire door is open on ports of this machine."""

import socket
import sys
import time
from pathlib import Path

import yaml

from tools.lab.child import POLL_S, Child, ChildError

START_S = 30.0
LOOPBACK = "127.0.0.1"


class PoolServer(Child):
    """A running server; ``address`` is what ``remote_servers`` names."""

    def __init__(self, root: Path, runtime: Path, pool_gb: float) -> None:
        """Starts it and waits until it accepts.

        Args:
            root: where its configuration and log go.
            runtime: where its socket goes; a short path.
            pool_gb: its memory.
        """
        root.mkdir(parents=True, exist_ok=True)
        config = root / "pool.yaml"
        config.write_text(yaml.safe_dump({"pipeline": "Cache", "socket": str(runtime / "pool.sock")}))
        self._port, manage = free_port(), free_port()
        self.address = f"{LOOPBACK}:{self._port}"
        command: list[str | Path] = [sys.executable, "-m", "kvdepot", "serve", "--config", config]
        command += ["--service-port", str(self._port), "--manage-port", str(manage), "--prealloc-size", str(pool_gb)]
        super().__init__("the pool server", command, root / "pool.log", {})
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def _wait_until_ready(self) -> None:
        while True:
            self.check()
            try:
                socket.create_connection((LOOPBACK, self._port), timeout=1).close()
            except OSError:
                if time.monotonic() - self.started_s > START_S:
                    raise ChildError(f"the pool server does not accept after {START_S:.0f} s\n{self.tail()}") from None
                time.sleep(POLL_S)
            else:
                return


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as one:
        one.bind((LOOPBACK, 0))
        port: int = one.getsockname()[1]
        return port
