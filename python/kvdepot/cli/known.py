"""The namespaces that a running depot knows, with their complete descriptions: ``/namespaces`` of its HTTP socket."""

import time
from dataclasses import dataclass

from kvdepot.cli.status_door import ask_json
from kvdepot.errors import UnavailableError
from kvdepot.stored.namespaces import StoredNamespace

PAGE = "/namespaces"


@dataclass(frozen=True)
class KnownNamespace:
    """A namespace as a running depot knows it.

    Attributes:
        socket: the depot's socket.
        namespace: its description and epoch, without directories.
        pool_blocks: its blocks in the pool.
        pool_bytes: their memory.
        used_unix_s: when it was last stored to, loaded or looked for; ``None`` = not since the depot started.
    """

    socket: str
    namespace: StoredNamespace
    pool_blocks: int
    pool_bytes: int
    used_unix_s: float | None


def known_to(socket: str, prefix: str = "") -> dict[str, KnownNamespace]:
    """Returns the namespaces that the depot at ``socket`` knows whose names begin with ``prefix``, by their names.

    Raises:
        UnavailableError: its HTTP socket does not answer, or not as this version's does.
    """
    found: dict[str, KnownNamespace] = {}
    after: list[tuple[str, str]] = []
    while True:
        answer = ask_json(socket, PAGE, [("namespace", prefix), *after])
        try:
            for row in answer["namespaces"]:
                layout = tuple((int(count), tuple(map(int, tensors))) for count, tensors in row["layout"])
                described = StoredNamespace(row["namespace"], (), dict(row["facts"]), layout, int(row["epoch"]))
                used = None if row["used_s"] is None else time.time() - row["used_s"]
                found[described.root] = KnownNamespace(
                    socket, described, int(row["pool_blocks"]), int(row["pool_bytes"]), used
                )
            following = answer["next"]
        except (KeyError, TypeError, ValueError) as error:
            raise UnavailableError(
                f"{socket}.http: the list of namespaces cannot be read: {type(error).__name__}: {error}"
            ) from error
        if following is None:
            return found
        after = [("after", str(following))]
