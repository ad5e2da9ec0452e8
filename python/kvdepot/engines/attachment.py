"""An engine's attachment to the node's depot."""

from typing import TYPE_CHECKING

import kvdepot

if TYPE_CHECKING:
    from kvdepot.config import KVDepotConfig

GLANCE_MS = 500
"""Milliseconds that an engine which starts no depot waits for one; an existing one answers within a few."""


def attach(config: "KVDepotConfig", engine_id: str = "", block_bytes: int | None = None) -> "kvdepot.Depot":
    """Attaches to the node's depot. If none answers, starts it, or with ``start_depot: false`` goes on without.

    Either way the attachment keeps looking for one in the background. The caller logs that there is none.

    Args:
        config: the engine's configuration.
        engine_id: distinguishes depots of engines that do not share one.
        block_bytes: bytes of a block, to choose the sizes of a depot that is started; ``None`` = not known.

    Raises:
        ConfigError: the pool that this engine would start does not fit the machine.
        ProtocolError: another service, or another version of kvdepot, answers at the socket.
    """
    if config.mode != "node":
        config = config.model_copy(update={"mode": "node"})
    wait_ms = config.attach_timeout_ms if config.start_depot else min(GLANCE_MS, config.attach_timeout_ms)
    return kvdepot.attach(config, engine_id=engine_id, block_bytes=block_bytes, wait_ms=wait_ms, tell_absence=False)
