"""An engine's attachment to the node's depot."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvdepot.config import KVDepotConfig
from kvdepot.node import connect

if TYPE_CHECKING:
    from kvdepot._native import Depot, Namespace

GLANCE_MS = 500
"""Milliseconds that an engine which starts no depot waits for one; an existing one answers within a few."""


def attach(config: KVDepotConfig, socket: str, block_bytes: int | None = None) -> "Depot":
    """Attaches to the depot at a socket. If none answers, starts it, or with ``start_depot: false`` goes on without.

    Either way the attachment keeps looking for one in the background.

    Args:
        config: the engine's configuration.
        socket: path of the depot's socket.
        block_bytes: bytes of a block, to choose the sizes of a depot that is started; ``None`` = not known.

    Raises:
        ConfigError: the pool that this engine would start does not fit the machine.
        ProtocolError: another service, or another version of kvdepot, answers at the socket.
    """
    from kvdepot.logs import set_up_logging

    set_up_logging(config)
    wait_ms = config.attach_timeout_ms if config.start_depot else min(GLANCE_MS, config.attach_timeout_ms)
    return connect(config, socket, block_bytes, wait_ms)


def close_unused(depot: "Depot", earlier: Iterable["Namespace"], now: Iterable["Namespace"]) -> None:
    """Closes earlier namespaces that are not in use any more: the depot lets a process use 2,048 at a time."""
    used = {namespace.canonical for namespace in now}
    for namespace in earlier:
        if namespace.canonical not in used:
            depot.close_namespace(namespace)
