"""Order between the engine's compute and the core's copies (P3)."""

from typing import Any


class ComputeOrder:
    """Marks what the device has been told to compute, and waits for it before a copy may read.

    On a CPU the forward has run when it returns, so there is nothing to mark. On a CUDA device an event is recorded on
    the compute stream; with ``event_sync`` a copy waits for that event alone, without it for the whole stream.
    """

    def __init__(self, event_sync: bool) -> None:
        self._event_sync = event_sync
        self._event: Any = None

    def mark(self) -> None:
        """What was launched until now is what the next copies read."""
        cuda = _cuda()
        if cuda is not None:
            self._event = cuda.Event()
            self._event.record(cuda.current_stream())

    def wait(self) -> None:
        """Returns when what was marked has been computed."""
        cuda = _cuda()
        if cuda is None:
            return
        if self._event_sync and self._event is not None:
            self._event.synchronize()
        else:
            cuda.current_stream().synchronize()
        self._event = None

    def wait_if(self, needed: bool) -> None:
        """Waits for all that was launched until now, when that is needed."""
        if needed:
            self.mark()
            self.wait()


def _cuda() -> Any:
    """``torch.cuda`` when this process computes with it."""
    import torch

    cuda: Any = torch.cuda
    return cuda if cuda.is_available() and cuda.is_initialized() else None
