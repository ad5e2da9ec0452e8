"""What the operator sees of the counts: a line in SGLang's log, and a series in its metrics."""

import functools
import importlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from kvdepot.engines.counters import Counters

SAY_S = 60.0
"""Seconds between two lines with counts. Without new counts there is none."""
SERIES = "sglang:kvdepot_counts"
SERIES_TEXT = "Pages by what became of them in kvdepot, over all ranks; leases_expired counts hits, late_… copies."

logger = logging.getLogger("sglang.kvdepot")


class Report(Counters):
    """Counts that are logged once a minute, and added to SGLang's metrics. Any number of threads may use it.

    Args:
        series: a counter of Prometheus with the label ``name``; ``None`` = SGLang has no metrics.
        clock: tells the seconds.
    """

    def __init__(self, series: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(lambda: logger)
        self._series = series
        self._clock = clock
        self._told: dict[str, int] = {}
        self._told_s = clock()
        self._telling = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        """Adds ``count``; does nothing for 0."""
        super().add(name, count)
        self._show(name, count)

    def trouble(self, name: str, message: str, count: int = 1) -> None:
        """Counts a failure that became a miss, and logs ``message`` unless the same name was logged recently."""
        super().trouble(name, message, count)
        self._show(name, count)

    def say(self, least_s: float = 0.0) -> None:
        """Logs what was counted since the last such line, if anything was, and that is at least ``least_s`` ago."""
        with self._telling:
            now_s, counts = self._clock(), self.snapshot()
            if now_s - self._told_s < least_s:
                return
            grown = {name: count - self._told.get(name, 0) for name, count in counts.items()}
            found = ", ".join(f"{name} {count}" for name, count in grown.items() if count)
            seconds, self._told, self._told_s = now_s - self._told_s, counts, now_s
        if found:
            logger.info("kvdepot: in the last %.0f s: %s", seconds, found)

    def _show(self, name: str, count: int) -> None:
        if not count:
            return
        try:
            if self._series is not None:
                self._series.labels(name=name).inc(count)
        except Exception as error:  # noqa: BLE001 - a metric is worth no failed request
            self._series = None
            logger.warning("kvdepot: its counts are not in SGLang's metrics any more: %r", error)
        if self._clock() - self._told_s >= SAY_S:
            self.say(SAY_S)


def report_for(arguments: Any) -> Report:
    """Returns the counts of a face of the SGLang with these arguments."""
    return Report(_series() if getattr(arguments, "enable_metrics", False) else None)


@functools.cache
def _series() -> Any:
    """Returns this process's series, which outlives the faces: Prometheus refuses a second one of the same name."""
    try:
        return importlib.import_module("prometheus_client").Counter(SERIES, SERIES_TEXT, ["name"])
    except (ImportError, ValueError) as error:
        logger.warning("kvdepot: its counts are not in SGLang's metrics: %r", error)
        return None
