"""Sends resets to the depot on a thread of its own, so that neither a clear nor the lookups after it wait for tiers."""

import threading
import time
from collections.abc import Callable

from kvdepot.engines.resets import AGAIN_S, Resets
from kvdepot.errors import is_failure

CLEAR_S = 1.0
"""Seconds that a clear waits for the depot's confirmation; after that it is retried in the background."""
UNSETTLED = (
    "kvdepot: closed before the depot has confirmed a reset, so blocks of before it may be found again: clear again, "
    "or run `kvdepot reset`"
)
"""What a face logs as an error if it closes while not everything is settled: nobody sends the reset any more."""


class Clearing:
    """Retries resets until the depot has confirmed them. Any number of threads may use it.

    Args:
        resets: tracks what is to be confirmed.
        send: makes everything unreachable; returns whether the depot has confirmed that. May take long.
    """

    def __init__(self, resets: Resets, send: Callable[[], bool]) -> None:
        self._resets = resets
        self._send = send
        self._changed = threading.Condition()
        self._due = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def settled(self) -> bool:
        """Returns whether nothing from before a clear is found. Never waits; if false, the depot is asked again."""
        if self._resets.settled:
            return True
        self.wake()
        return False

    def wake(self) -> None:
        """Triggers another attempt at unconfirmed resets."""
        with self._changed:
            if self._closed:
                return
            self._due = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvdepot-clear", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def confirmed(self, wait_s: float = CLEAR_S) -> bool:
        """Returns whether everything is confirmed within ``wait_s`` seconds."""
        self.wake()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._resets.settled, wait_s)
        return self._resets.settled

    def close(self, wait_s: float = CLEAR_S) -> None:
        """Stops retrying. Waits at most ``wait_s`` seconds for a reset in flight. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(wait_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                # Woken again for unconfirmed resets, and for stores from before a clear that are still in flight.
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
        except BaseException as error:  # a panic of the core: retried
            if not is_failure(error):
                raise
            return False
