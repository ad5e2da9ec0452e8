"""Order between the engine's compute and the core's copies (P3)."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ComputePoint:
    """Everything that the engine had launched at some moment. Kept until the copies that wait for it have ended.

    Attributes:
        handle: the device's event (``CUevent``); 0 if everything has already been computed.
    """

    handle: int = 0
    event: Any = None


NOW = ComputePoint()


class ComputeOrder:
    """Determines when the core may touch the engine's memory.

    On a CPU the forward has finished when it returns. On a CUDA device it has only been launched: an event is recorded
    on the compute stream, and the copies wait for it on the device. Without ``event_sync`` the engine's thread waits
    for the whole stream instead.
    """

    def __init__(self, event_sync: bool) -> None:
        self._event_sync = event_sync

    @property
    def immediate(self) -> bool:
        """Whether results are in memory as soon as their computation was launched."""
        return _cuda() is None

    def stream(self) -> int | None:
        """Returns the compute stream, on which a step's kernels can wait for loads; ``None`` if there is none."""
        cuda = _cuda()
        return int(cuda.current_stream().cuda_stream) if cuda is not None and self._event_sync else None

    def point(self) -> ComputePoint:
        """Returns the point after everything launched so far."""
        cuda = _cuda()
        if cuda is None:
            return NOW
        stream = cuda.current_stream()
        if not self._event_sync:
            stream.synchronize()
            return NOW
        event = cuda.Event()
        event.record(stream)
        return ComputePoint(event.cuda_event, event)


def _cuda() -> Any:
    """Returns ``torch.cuda`` if this process computes with it."""
    import torch

    cuda: Any = torch.cuda
    return cuda if cuda.is_available() and cuda.is_initialized() else None
