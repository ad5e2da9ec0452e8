"""Asks a depot's HTTP socket, which lies beside its own."""

import http.client
import json
import socket
from typing import Any

WAIT_S = 2.0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=WAIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(self._path)


def read_status(socket_path: str) -> dict[str, Any] | None:
    """What ``/status`` says at ``SOCKET.http``; ``None`` when nobody answers within two seconds."""
    connection = _UnixConnection(f"{socket_path}.http")
    try:
        connection.request("GET", "/status")
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            return None
        status: dict[str, Any] = json.loads(answer.read())
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return status
