"""A door before a real S3 server: it passes requests on, counts them, and refuses those that a test chooses."""

import http.client
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from types import TracebackType

from typing_extensions import Self

from tools.lab.ports import LOOPBACK

SLOW_DOWN = 503
CODES = {SLOW_DOWN: "SlowDown", 500: "InternalError"}

# Decides on each request for an object: the status to refuse it with, or None to forward it.
Plan = Callable[[str, str], int | None]


class Inside(http.client.HTTPConnection):
    """A connection to the server's socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("inside")
        self._path = str(path)

    def connect(self) -> None:
        """Connects to the server's socket, whatever the address says."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


class Handler(BaseHTTPRequestHandler):
    """One connection of a depot."""

    protocol_version = "HTTP/1.1"
    # An answer goes out whole.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: "Front"

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        refused = self.server.ask(self.command, self.path)
        if refused is not None:
            text = f"<Error><Code>{CODES[refused]}</Code></Error>".encode()
            self.send_response(refused)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else text)
            return
        try:
            self._pass_on(body)
        except (OSError, http.client.HTTPException):
            # The server died: so does this connection.
            self.close_connection = True

    def _pass_on(self, body: bytes) -> None:
        inside = Inside(self.server.inside)
        try:
            inside.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                inside.putheader(name, value)
            inside.endheaders(body)
            answer = inside.getresponse()
            said = answer.read()
        finally:
            inside.close()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", answer.getheader("Content-Length") or str(len(said)))
        self.end_headers()
        # Before the depot has the answer: a test may look as soon as a request has ended.
        self.server.count(self.command, self.path)
        self.wfile.write(said)
        self.wfile.flush()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 - the names of the base class

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        """Says nothing."""


class Front(ThreadingHTTPServer):
    """The door. It closes with the ``with`` block.

    Attributes:
        inside: the server's socket.
        plan: what becomes of the next requests; None passes all on.
        refused: number of refused requests.
    """

    daemon_threads = True
    # As many connections as a depot opens at once.
    request_queue_size = 128

    def __init__(self, inside: Path) -> None:
        super().__init__((LOOPBACK, 0), Handler)
        self.inside = inside
        self.plan: Plan | None = None
        self.refused = 0
        self._lock = Lock()
        self._served: list[tuple[str, str]] = []
        self._thread = Thread(target=self.serve_forever)

    @property
    def endpoint(self) -> str:
        """The door's address."""
        return f"http://{LOOPBACK}:{self.server_port}"

    def ask(self, method: str, path: str) -> int | None:
        """Returns the status to refuse a request with, or None."""
        with self._lock:
            status = self.plan(method, path) if self.plan is not None else None
            self.refused += status is not None
            return status

    def count(self, method: str, path: str) -> None:
        """Counts a request that the server has answered."""
        with self._lock:
            self._served.append((method, path))

    def served(self, method: str, part: str = "") -> int:
        """Number of requests that the server has answered, of this method and with that part in their path."""
        with self._lock:
            return sum(one == method and part in path for one, path in self._served)

    def handle_error(self, request: object, client_address: object) -> None:
        """A depot that was killed is no fault."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
