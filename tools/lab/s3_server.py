"""A real S3 server, versitygw, behind a proxy that counts requests and can refuse them.

`KVDEPOT_TEST_S3` is the path of its program (`make test-s3` builds it).
"""

import os
import socket
import time
from pathlib import Path
from typing import Any

from tools.lab.bucket import NAME, object_options, write_credentials
from tools.lab.child import POLL_S, Child
from tools.lab.s3_front import Front

KEYS = ("test", "secret")
START_S = 60.0


class Server:
    """The server: its files, and its process while it runs.

    Attributes:
        front: the door before it.
    """

    def __init__(self, home: Path, runtime: Path) -> None:
        self._home, self._socket = home, runtime / "s3.sock"
        (home / "buckets" / NAME).mkdir(parents=True)
        self.front = Front(self._socket)
        self._process: Child | None = None

    def start(self) -> None:
        """Starts a process on what earlier ones have stored, and waits until it listens."""
        self._socket.unlink(missing_ok=True)
        command: list[str | Path] = [os.environ["KVDEPOT_TEST_S3"], "--quiet", "--port", self._socket]
        environ = dict(zip(("ROOT_ACCESS_KEY", "ROOT_SECRET_KEY"), KEYS, strict=True))
        log = self._home / "log"
        self._process = Child("the S3 server", [*command, "posix", self._home / "buckets"], log, environ)
        end_s = time.monotonic() + START_S
        while not self._listens():
            self._process.check()
            assert time.monotonic() < end_s, self._process.tail()
            time.sleep(POLL_S)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as one:
            return one.connect_ex(str(self._socket)) == 0

    def kill(self) -> None:
        """Ends the process as a crash does."""
        if self._process is not None:
            self._process.kill()

    def options(self, secret: str = KEYS[1]) -> dict[str, Any]:
        """What a configuration says to use it."""
        credentials = self._home / f"credentials-{secret}"
        write_credentials(credentials, KEYS[0], secret)
        return object_options(self.front.endpoint, credentials)
