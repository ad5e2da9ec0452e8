"""Other connectors that use the engine's pages, below `MultiConnector` or whatever else has connectors of its own."""

import sys
from types import FrameType

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

FRAMES_MAX = 64


def has_siblings(connector: KVConnectorBase_V1) -> bool:
    """Returns whether another connector creates this one; called from its constructor.

    Read from the callers' frames: a connector's configuration does not say it, and vLLM's current configuration is not
    set while the scheduler creates its connector.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - vLLM passes none of this
    for _ in range(FRAMES_MAX):
        if frame is None:
            break
        caller = frame.f_locals.get("self")
        if isinstance(caller, KVConnectorBase_V1) and caller is not connector:
            return True
        frame = frame.f_back
    return False
