"""A store attached to the test's own depot, which can be stopped: it gates everything that calls it."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvdepot
from tools.lab.pause import paused

# With a last call, which may take another minute, less than a test may take.
OPEN_S = 55.0


class NodeDepot:
    """A depot process under a socket."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = {
            "mode": "node",
            "socket": str(directory / "depot.sock"),
            "pipeline": "Cache",
            "pool_gb": 0.0625,
            "log_level": "warn",
            "attach_timeout_ms": 50_000,
            "timeout_ms": 60_000,
            "call_timeout_ms": 60_000,
        }
        self.pid = 0

    @contextmanager
    def with_files(self, directory: Path) -> Iterator["NodeDepot"]:
        """Within the context the depot stores up to 0.1 GiB of files, in a new directory; then it is ended."""
        directory.mkdir()
        self.config |= {"pipeline": "Cache|Posix", "directories": [str(directory)], "posix_capacity_gb": 0.1}
        try:
            yield self
        finally:
            self.kill()

    def open(self, layout: Any, namespace: dict[str, object]) -> kvdepot.Store:
        """Returns a store attached to this depot, which the first one starts."""
        end_s = time.monotonic() + OPEN_S
        store = kvdepot.open(self.config, layout=layout, namespace=namespace)
        # A depot that a busy machine does not run for five seconds is lost, and attached to again.
        while not (depot := store.stats().get("depot")):
            assert time.monotonic() < end_s, "no depot answers"
            time.sleep(0.02)
        self.pid = depot["pid"]
        return store

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Within the context the depot answers nothing, so no task that needs it can end."""
        with paused(self.pid):
            yield

    def kill(self) -> None:
        """Ends the depot."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
