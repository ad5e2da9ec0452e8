"""Publishes what a depot has until it is stopped."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from kvdepot.events import PAUSE_S, BlockEvents
from kvdepot.publish.sockets import Sockets
from kvdepot.publish.stream import Batch, EventStream

BLOCKS_PER_TURN = 8192
REPEAT_BATCHES_MAX = 32
"""Maximum number of batches of a repetition in ``PAUSE_S``: 64 Ki blocks, about 600 KB."""
MIXED = "routers take a block of one for a block of each: name those of one engine with --namespace"
Report = Callable[[str, dict[str, Any]], None]


class Publisher:
    """See the module."""

    def __init__(
        self, events: BlockEvents, stream: EventStream, sockets: Sockets, report: Report, repeat_s: float = 0
    ) -> None:
        """Prepares to publish.

        Args:
            events: follows the depot.
            stream: numbers and keeps the batches.
            sockets: sends them.
            report: takes what the user should know: a name and its values.
            repeat_s: seconds between two repetitions of the whole contents; 0 = never.
        """
        self._events = events
        self._stream = stream
        self._sockets = sockets
        self._report = report
        self._repeat_s = repeat_s
        # A subscriber that reads at this pace has room for changes, too.
        self._repeat_batches = max(1, min(REPEAT_BATCHES_MAX, sockets.queue_batches // 4))
        self._repeated_s = self._told_again_s = 0.0
        self._attached: bool | None = None
        self._told_contents = False
        self._namespaces = 0
        self._ambiguous = 0
        self._told_mixed = False

    def run(self, stop: threading.Event) -> None:
        """Publishes until ``stop`` is set or something fails, and then says that nothing is known any more."""
        try:
            self._follow(stop)
        except BaseException:
            # Routers would keep what they know. If the sockets are what failed, the first error says more.
            with contextlib.suppress(Exception):
                self._publish(self._stream.end(time.time()))
            raise
        self._publish(self._stream.end(time.time()))
        self._report("ended", self._counters())

    def _follow(self, stop: threading.Event) -> None:
        self._publish(self._stream.begin(time.time()))
        self._repeated_s = time.monotonic()
        while not stop.is_set():
            # In this order, so that everything that was there has been taken.
            in_step = self._events.in_step
            taken = self._events.take(BLOCKS_PER_TURN)
            self._publish(self._stream.add(taken, time.time()))
            self._tell(in_step and not taken)
            if self._repeat_s:
                self._publish(self._again(time.monotonic()))
            answered = self._answer()
            if not (self._sockets.turn(time.monotonic()) or taken or answered):
                self._sockets.wait(PAUSE_S)

    def _answer(self) -> bool:
        """Begins to answer the requests that can be answered, before other batches: they share the contents."""

        def admits(start: int) -> bool:
            return self._stream.admits(start, time.monotonic())

        answered = False
        while request := self._sockets.request(admits, time.monotonic()):
            self._sockets.answer(request, self._stream.replay(request.start, time.time()), time.monotonic())
            answered = True
        return answered

    def _again(self, now_s: float) -> list[Batch]:
        """Returns the batches of a repetition that are due."""
        if now_s - self._told_again_s < PAUSE_S:
            return []
        if not self._stream.is_repeating:
            if now_s - self._repeated_s < self._repeat_s:
                return []
            self._repeated_s = now_s
        self._told_again_s = now_s
        return self._stream.repeat(self._repeat_batches, time.time())

    def _publish(self, batches: list[Batch]) -> None:
        for batch in batches:
            self._sockets.publish(batch)

    def _tell(self, in_step: bool) -> None:
        """Reports a depot that comes or goes, its namespaces, and when everything that it has is published."""
        contents = self._stream.contents
        attached = self._events.attached
        if attached != self._attached:
            self._attached, self._told_contents = attached, False
            self._report("attached" if attached else "no depot answers", {})
        if len(contents.published) > self._namespaces:
            for name in contents.published[self._namespaces :]:
                self._report("namespace", {"namespace": name})
            self._namespaces = len(contents.published)
        if contents.is_mixed and not self._told_mixed:
            self._told_mixed = True
            self._report("several namespaces", {"advice": MIXED})
        for prefix, taken, other in contents.ambiguous[self._ambiguous :]:
            self._report("ambiguous", {"namespace": prefix, "published": taken, "ignored": other})
        self._ambiguous = len(contents.ambiguous)
        if in_step and attached and not self._told_contents:
            self._told_contents = True
            self._report("contents", self._counters())

    def _counters(self) -> dict[str, Any]:
        return {
            "blocks": self._stream.contents.blocks(),
            "batches": self._stream.batches,
            "blocks_stored": self._stream.blocks_stored,
            "blocks_removed": self._stream.blocks_removed,
            "next_sequence": self._stream.next_sequence,
            "replays_dropped": self._sockets.answers_dropped,
            "requests_malformed": self._sockets.malformed,
        }
