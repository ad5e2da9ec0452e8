"""A depot in a process of its own, as benchmarks use it: attached, scraped, and its processor time read."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvdepot import _native

SCRAPE_S = 60.0
TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Served:
    """A running depot.

    Attributes:
        depot: attached through its socket.
        socket: path of that socket.
        pid: its process.
    """

    depot: _native.Depot
    socket: str
    pid: int

    def scrape(self) -> bytes:
        """Reads ``/metrics`` as a scraper does, over a connection of its own."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(SCRAPE_S)
            connection.connect(f"{self.socket}.http")
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 ") or not body.endswith(b"# EOF\n"):
            raise RuntimeError("the depot of the benchmark did not answer a scrape")
        return body

    def processor_s(self) -> float:
        """Returns the processor time of its process so far, to a tick of the kernel's clock (mostly 10 ms)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_S


@contextmanager
def served(config: dict[str, object]) -> Iterator[Served]:
    """Yields a depot in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "bench.sock")
        command = [sys.executable, "-m", "kvdepot", "serve", "--core-json", json.dumps(config), "--socket", path]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            depot = _native.Depot.connect(path, None, wait_ms=60_000, call_timeout_ms=5_000)
            if not depot.attached:
                raise RuntimeError("the depot of the benchmark did not start")
            yield Served(depot, path, process.pid)
            depot.close()
        finally:
            process.kill()
            process.wait()
