"""Calls over a pipe to an object in another process: that process's side."""

import sys
from multiprocessing.connection import Connection
from typing import Any

Reply = tuple[bool, Any]
"""Whether the call returned, and the result; or the name and the text of the exception."""


def serve(target: object) -> None:
    """Serves calls of ``target``'s methods on the descriptor in the first argument, until the caller disconnects."""
    calls = Connection(int(sys.argv[1]))
    while True:
        try:
            name, arguments = calls.recv()
        except EOFError:
            return
        try:
            reply: Reply = (True, getattr(target, name)(*arguments))
        except Exception as error:  # noqa: BLE001 - goes to the caller
            reply = (False, (type(error).__name__, str(error)))
        calls.send(reply)
