"""Records requests in the files of a trace when they end (``enable_record_traces``)."""

import os
import time
from typing import TYPE_CHECKING, Protocol

from kvdepot.config import KVDepotConfig
from kvdepot.config.environment import trace_limits
from kvdepot.config.machine import Machine
from kvdepot.engines.vllm.groups import Geometry
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.stats import DepotStats
from kvdepot.errors import KVDepotError, is_failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

logger = connector_logger()
OUTCOMES = ("written", "dropped", "failed")


class Recorder(Protocol):
    """Interface of the writer: ``kvdepot.traces.live.Recorder``."""

    def record(
        self, block_hashes: "Sequence[bytes]", *, timestamp_ms: int, input_length: int, output_length: int
    ) -> bool:
        """Queues a request; never waits."""

    def counters(self) -> tuple[int, int, int]:
        """Returns numbers of requests by ``OUTCOMES``."""

    def close(self, wait_ms: int = 2000) -> bool:
        """Ends the recording. Returns whether everything queued was written in time."""


class Recording:
    """Hands finished requests to a recorder. Calls come from the scheduler's thread and never wait for a disk."""

    def __init__(self, recorder: Recorder, hash_tokens: int, begin_s: float) -> None:
        self._recorder = recorder
        self._hash_tokens = hash_tokens
        self._begin_s = begin_s
        self._counted = (0, 0, 0)
        self._off = False
        self._lost = 0

    def ended(self, request: "Request") -> None:
        """Records a request that has ended for any reason. Never raises: a trace must not stop an engine."""
        if not self._off:
            try:
                self._record(request)
            except BaseException as error:  # noqa: BLE001 - a panic is one, too
                self._switch_off(error)
        if self._off:
            self._lost += 1

    def _record(self, request: "Request") -> None:
        prompt = request.num_prompt_tokens
        came_ms = max(0, round((request.arrival_time - self._begin_s) * 1000))
        hashes = request.block_hashes[: prompt // self._hash_tokens]
        answer = request.num_tokens - prompt
        self._recorder.record(hashes, timestamp_ms=came_ms, input_length=prompt, output_length=answer)

    def count(self, stats: DepotStats) -> None:
        """Adds the outcomes of requests since the last call."""
        lost, self._lost = self._lost, 0
        stats.add("traced_requests", lost, "failed")
        if self._off:
            return
        try:
            now = self._recorder.counters()
        except BaseException as error:  # noqa: BLE001 - a panic is one, too
            self._switch_off(error)
            return
        for outcome, count, before in zip(OUTCOMES, now, self._counted, strict=True):
            stats.add("traced_requests", count - before, outcome)
        self._counted = now

    def close(self) -> None:
        """Ends the recording. Queued requests are written if the disk takes them soon."""
        try:
            self._close()
        except BaseException as error:  # noqa: BLE001 - a panic is one, too
            self._switch_off(error)

    def _switch_off(self, error: BaseException) -> None:
        if not is_failure(error):
            raise error
        if not self._off:
            self._off = True
            logger.error("kvdepot: requests are not recorded from now on: %s", error, exc_info=error)

    def _close(self) -> None:
        _, dropped, failed = self._recorder.counters()
        if not self._recorder.close():
            logger.warning("kvdepot: the trace's last requests were not written in time")
        if dropped or failed:
            logger.warning(
                "kvdepot: %d requests are not in the trace: %d found its queue full", dropped + failed, dropped
            )


def record(config: KVDepotConfig, geometry: Geometry) -> Recording | None:
    """Begins a recording. If that is impossible, logs a warning and returns ``None``: no request fails for it (P2).

    Raises:
        ConfigError: an environment variable is wrong.
    """
    if geometry.unsupported:
        logger.warning("kvdepot: requests are not recorded: %s", geometry.unsupported)
        return None
    from kvdepot.traces import live
    from kvdepot.traces.files import recorded_name

    machine = Machine.here()
    directory = config.trace_directory or os.path.join(machine.cache_directory(), "traces")
    file_bytes, files = trace_limits(config.trace_file_mb, config.trace_files, machine.environ)
    begin_s = time.time()
    try:
        recorder = live.Recorder(
            directory,
            recorded_name(int(begin_s * 1000), os.getpid()),
            block_tokens=geometry.hash_tokens,
            file_bytes=file_bytes,
            files_max=files,
        )
    except KVDepotError as error:
        logger.warning("kvdepot: requests are not recorded: %s", error)
        return None
    logger.info("kvdepot: requests are recorded in %s", directory)
    return Recording(recorder, geometry.hash_tokens, begin_s)
