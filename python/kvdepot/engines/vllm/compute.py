"""Order between the engine's compute and the core's copies (P3)."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from kvdepot.engines.vllm.log import connector_logger

logger = connector_logger()


class ComputeOrder:
    """Runs what reads the engine's memory after the compute that writes it.

    On a CPU the forward has run when it returns. On a CUDA device it has only been launched: an event is recorded on
    the compute stream, and a thread of its own waits for it, so that the engine's does not. Without ``event_sync`` the
    engine's thread waits for the whole stream instead.
    """

    def __init__(self, event_sync: bool) -> None:
        self._event_sync = event_sync
        self._waiting: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def immediate(self) -> bool:
        """Whether what was computed is in memory as soon as it was launched."""
        return _cuda() is None

    def after(self, run: Callable[[], None]) -> None:
        """Calls ``run`` when everything launched until now has been computed."""
        cuda = _cuda()
        if cuda is None:
            run()
        elif not self._event_sync:
            cuda.current_stream().synchronize()
            run()
        else:
            event = cuda.Event()
            event.record(cuda.current_stream())
            if self._thread is None:
                self._thread = threading.Thread(target=self._wait_in_turn, name="kvdepot-events", daemon=True)
                self._thread.start()
            self._waiting.put((event, run))

    def _wait_in_turn(self) -> None:
        while (item := self._waiting.get()) is not None:
            event, run = item
            try:
                event.synchronize()
                run()
            except Exception:  # the thread has to live; what is not submitted fails by its task's own deadline (P2)
                logger.exception("kvdepot: a dump could not be handed over")

    def close(self) -> None:
        """Returns when everything that was given to ``after`` has run."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None


def _cuda() -> Any:
    """``torch.cuda`` when this process computes with it."""
    import torch

    cuda: Any = torch.cuda
    return cuda if cuda.is_available() and cuda.is_initialized() else None
