"""Load on a server, either of which may be killed: puts and gets, reconnects, checks every byte.

Run as ``-m tools.wire.load_child PORT CLIENT SEED FILE``. ``FILE`` gets lines of JSON with all
counts so far: they are all that remains of a killed process.
"""

import json
import random
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tools.lab.ports import LOOPBACK
from tools.wire.frames import FINISH, ClosedError, Raw

KEYS = 40
SIZES = [1, 4096, 65_537, 300_000, 1_048_579]
RETRY_S = 0.02
REPORT_S = 0.02


class Client(Protocol):
    """Operations of the load."""

    def put(self, key: str, value: bytes) -> None:
        """Stores a value."""

    def get(self, key: str) -> bytes | None:
        """Returns a value; None for a miss."""


class RawClient:
    """Our own minimal client."""

    def __init__(self, port: int) -> None:
        self._raw = Raw(port)

    def put(self, key: str, value: bytes) -> None:
        """Stores a value."""
        code = self._raw.put(key, value)
        if code != FINISH:
            raise ClosedError(f"refused: {code}")

    def get(self, key: str) -> bytes | None:
        """Returns a value; None for a miss."""
        return self._raw.get(key)


class PeerClient:
    """InfiniStore's client. Existing keys are never deleted here, unless the server dies: that ends the wait."""

    def __init__(self, port: int) -> None:
        import infinistore
        import numpy as np

        self._numpy = np
        self._connection: Any = infinistore.InfinityConnection(
            infinistore.ClientConfig(
                host_addr=LOOPBACK, service_port=port, connection_type=infinistore.TYPE_TCP, log_level="error"
            )
        )
        self._connection.connect()

    def put(self, key: str, value: bytes) -> None:
        """Stores a value."""
        data = self._numpy.frombuffer(value, dtype=self._numpy.uint8)
        self._connection.tcp_write_cache(key, data.ctypes.data, data.nbytes)

    def get(self, key: str) -> bytes | None:
        """Checks whether the value exists, then gets it."""
        if not self._connection.check_exist(key):
            return None
        value: bytes = self._connection.tcp_read_cache(key).tobytes()
        return value


CLIENTS: dict[str, Callable[[int], Client]] = {"raw": RawClient, "infinistore": PeerClient}


def value_of(key: int, version: int) -> bytes:
    """Returns a value that identifies its key and version in every eight bytes."""
    nbytes = SIZES[(key + version) % len(SIZES)]
    return (struct.pack("<II", key, version) * (nbytes // 8 + 1))[:nbytes]


def is_whole(key: int, value: bytes) -> bool:
    """Returns whether it is a value of that key, of one version."""
    if len(value) == 1:
        return value == bytes([key])
    if len(value) not in SIZES:
        return False
    of_key, version = struct.unpack("<II", value[:8])
    return bool(of_key == key and value == value_of(key, version))


class Load:
    """Runs operations until it is killed."""

    def __init__(self, port: int, client: str, seed: int, report: Path) -> None:
        self.port, self.client = port, client
        self.rng = random.Random(seed)
        self.counts = {"puts": 0, "hits": 0, "misses": 0, "wrong": 0, "connects": 0, "broken": 0}
        self._report = report.open("a", buffering=1)
        self._reported_s = 0.0

    def run(self) -> None:
        """Runs forever."""
        while True:
            # The client raises bare Exception when its server is gone.
            with suppress(Exception):
                client = CLIENTS[self.client](self.port)
                self._count("connects")
                while True:
                    self.step(client)
            self._count("broken")
            time.sleep(RETRY_S)

    def step(self, client: Client) -> None:
        """Runs one operation."""
        key = self.rng.randrange(KEYS)
        if self.rng.random() < 0.5:
            client.put(f"load-{key}", value_of(key, self.rng.randrange(1 << 31)))
            self._count("puts")
            return
        value = client.get(f"load-{key}")
        if value is None:
            self._count("misses")
        else:
            self._count("hits" if is_whole(key, value) else "wrong")

    def _count(self, what: str) -> None:
        self.counts[what] += 1
        if what == "wrong" or time.monotonic() - self._reported_s > REPORT_S:
            self._reported_s = time.monotonic()
            self._report.write(json.dumps(self.counts) + "\n")


if __name__ == "__main__":
    Load(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])).run()
