"""Sends resets to the depot from a thread of its own: SGLang clears on its scheduler's thread, which must not wait."""

import threading
import time
from collections.abc import Callable

from kvdepot.engines.resets import AGAIN_S, Resets
from kvdepot.errors import is_failure

CLEAR_S = 1.0
"""How long a clear waits for the depot's confirmation; after that it goes on being asked for in the background."""


class Clearing:
    """Asks for what was cleared until the depot has confirmed it. Any number of threads may use it.

    Args:
        resets: what is to be confirmed.
        send: makes everything unreachable; whether the depot has confirmed that. May take long.
    """

    def __init__(self, resets: Resets, send: Callable[[], bool]) -> None:
        self._resets = resets
        self._send = send
        self._changed = threading.Condition()
        self._due = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def settled(self) -> bool:
        """Whether nothing from before a clear is found. Never waits; when it is not so, the depot is asked again."""
        if self._resets.settled:
            return True
        self.wake()
        return False

    def wake(self) -> None:
        """Has the depot asked for what it has not confirmed."""
        with self._changed:
            if self._closed:
                return
            self._due = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvdepot-clear", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def confirmed(self, wait_s: float = CLEAR_S) -> bool:
        """Whether all is confirmed within ``wait_s`` seconds."""
        self.wake()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._resets.settled, wait_s)
        return self._resets.settled

    def close(self, wait_s: float = CLEAR_S) -> None:
        """Asks no more. Waits ``wait_s`` seconds at most for a reset that is under way. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(wait_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                # What is not confirmed, or a store from before a clear that still runs, is looked after again.
                self._changed.wait_for(lambda: self._closed or self._due, None if self._resets.settled else AGAIN_S)
                if self._closed:
                    return
                self._due = False
            number = self._resets.attempt(time.monotonic())
            if number is not None and self._sent():
                self._resets.confirm(number)
            with self._changed:
                self._changed.notify_all()

    def _sent(self) -> bool:
        try:
            return self._send()
        except BaseException as error:  # a panic of the core: asked again
            if not is_failure(error):
                raise
            return False
