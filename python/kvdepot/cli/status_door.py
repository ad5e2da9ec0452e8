"""Client of a depot's HTTP socket, which lies beside its own."""

import http.client
import json
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlencode

from kvdepot.errors import ConfigError, UnavailableError

WAIT_S = 10.0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, wait_s: float) -> None:
        super().__init__("localhost", timeout=wait_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def read_status(socket_path: str, wait_s: float = WAIT_S) -> dict[str, Any] | None:
    """Returns ``/status`` of ``SOCKET.http``; ``None`` if there is no answer within ``wait_s``, more than 0."""
    page = read_page(socket_path, "/status", wait_s)
    try:
        status: dict[str, Any] | None = None if page is None else json.loads(page)
    except ValueError:
        return None
    return status


def read_page(socket_path: str, path: str, wait_s: float = WAIT_S) -> bytes | None:
    """Returns a page of ``SOCKET.http``; ``None`` if there is no successful answer within ``wait_s``."""
    answer = ask_page(socket_path, path, wait_s)
    return answer[1] if answer is not None and answer[0] == http.HTTPStatus.OK else None


def ask_json(socket_path: str, page: str, query: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Returns the answer of ``SOCKET.http`` to a question.

    Raises:
        UnavailableError: there is no answer within ten seconds, or not by a depot of this version.
        ConfigError: the depot refuses the question.
    """
    answer = ask_page(socket_path, f"{page}?{urlencode(query, quote_via=quote)}")
    if answer is None:
        raise UnavailableError(
            f"no depot answers at {socket_path}.http: start one with kvdepot serve, or name its --socket"
        )
    status, body = answer
    try:
        told: dict[str, Any] = json.loads(body)
    except ValueError:
        raise UnavailableError(
            f"the process that listens on {socket_path}.http is not a depot of this version"
        ) from None
    if status == http.HTTPStatus.SERVICE_UNAVAILABLE:
        raise UnavailableError(str(told.get("error", "the depot answers too many questions: ask again")))
    if status != http.HTTPStatus.OK:
        raise ConfigError(str(told.get("error", f"the depot answered with status {status}")))
    return told


def ask_page(socket_path: str, path: str, wait_s: float = WAIT_S) -> tuple[int, bytes] | None:
    """Returns status and body of an answer of ``SOCKET.http``; ``None`` if there is none within ``wait_s``."""
    connection = _UnixConnection(f"{socket_path}.http", wait_s)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, ValueError, http.client.HTTPException):
        return None
    finally:
        connection.close()
