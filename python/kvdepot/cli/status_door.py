"""Client of a depot's HTTP socket, which lies beside its own."""

import http.client
import json
import socket
from typing import Any

WAIT_S = 10.0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=WAIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(self._path)


def read_status(socket_path: str) -> dict[str, Any] | None:
    """Returns ``/status`` of ``SOCKET.http``; ``None`` if there is no answer within ten seconds."""
    page = read_page(socket_path, "/status")
    try:
        status: dict[str, Any] | None = None if page is None else json.loads(page)
    except ValueError:
        return None
    return status


def read_page(socket_path: str, path: str) -> bytes | None:
    """Returns a page of ``SOCKET.http``; ``None`` if there is no successful answer within ten seconds."""
    connection = _UnixConnection(f"{socket_path}.http")
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read() if answer.status == http.HTTPStatus.OK else None
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
