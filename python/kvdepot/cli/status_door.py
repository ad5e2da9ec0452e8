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
    answer = ask_page(socket_path, path)
    return answer[1] if answer is not None and answer[0] == http.HTTPStatus.OK else None


def ask_page(socket_path: str, path: str) -> tuple[int, bytes] | None:
    """Returns status and body of an answer of ``SOCKET.http``; ``None`` if there is none within ten seconds."""
    connection = _UnixConnection(f"{socket_path}.http")
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
