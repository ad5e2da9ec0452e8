"""The connection to the depot that all engines of a node share."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdepot._native import Depot
    from kvdepot.config import KVDepotConfig


def connect(config: "KVDepotConfig", socket: str, block_bytes: int | None, wait_ms: int) -> "Depot":
    """Attaches to the depot at a socket, or starts it with this configuration unless ``start_depot`` is false.

    Args:
        config: configuration of the engine.
        socket: path of the depot's socket.
        block_bytes: bytes of a block, to choose the sizes of a depot that is started; ``None`` = not known.
        wait_ms: how long to wait for a depot. The attachment keeps looking for one in the background.

    Raises:
        ConfigError: the pool that would be started does not fit the machine.
        ProtocolError: another service, or another version of kvdepot, answers at the socket.
    """
    from kvdepot import _native

    return _native.Depot.connect(
        socket,
        spawn=config.depot_command(socket, block_bytes),
        wait_ms=wait_ms,
        call_timeout_ms=config.call_timeout_ms,
        queue_depths=(config.waiting_queue_depth, config.running_queue_depth),
        passes_through=config.pool == "Staging",
    )
