"""kvdepot as a secondary tier of vLLM's own offloading (``TieringOffloadingSpec``), vLLM 0.32.

Everything except lookups runs on vLLM's scheduler thread. After the start, nothing is raised into vLLM: every failure
is a miss, counted by kind.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvdepot.engines.counters import Counters
from kvdepot.engines.offloading import metrics
from kvdepot.engines.offloading.answers import Answers, Verdict
from kvdepot.engines.offloading.asker import Asker
from kvdepot.engines.offloading.facts import calling_engine, chunk_facts, refuse_unsupported, windowed_groups
from kvdepot.engines.offloading.jobs import Ended, Jobs
from kvdepot.engines.offloading.options import read_options
from kvdepot.engines.offloading.room import Room, Verb
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.errors import ConfigError, is_failure

STEP_WAIT_S = 0.004
"""Seconds that vLLM's scheduler waits per step for all lookups together. Later answers are used in the next step."""
LATE_S = 1.0
"""Seconds that a request waits for the depot's answer, unless twice ``call_timeout_ms`` is longer."""

logger = connector_logger()

_Result = TypeVar("_Result")


class KVDepotTier(SecondaryTierManager):
    """Stores the chunks of vLLM's offloaded cache as blocks in the node's depot."""

    medium = Medium.STORAGE
    cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED  # the depot's memory, its disks or another node

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **tier_config: Any,
    ) -> None:
        """Attaches to the depot.

        Args:
            offloading_spec: vLLM's ``TieringOffloadingSpec``.
            primary_kv_view: vLLM's memory, of shape (chunks, bytes per chunk); a chunk has the bytes of all ranks.
            tier_type: name of the tier on the command line.
            backpressure_detector: vLLM's own; it may drop stores.
            tier_config: the other keys of the tier's entry in ``secondary_tiers``.

        Raises:
            ConfigError: a key is wrong, or the engine's KV cannot be identified or stored completely.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        options = read_options(tier_config)
        engine = calling_engine()
        blocks_per_chunk = offloading_spec.config.cache.blocks_per_chunk
        refuse_unsupported(engine, options, self.block_size_bytes, blocks_per_chunk)
        self._windowed = windowed_groups(engine)
        self.locality = Locality(options.locality) if options.locality else None
        self._base = _address(primary_kv_view)
        self._chunk_count = len(primary_kv_view)
        self._counters = Counters(connector_logger)
        self._changes = metrics.Changes()
        self._told_attached: bool | None = None
        self._apart = options.on_reset == "apart"
        facts = chunk_facts(offloading_spec, engine, options)
        suffix = str(offloading_spec.config.engine_id)
        self._room = Room(options.config, facts, self.block_size_bytes, self._counters, suffix=suffix)
        logger.info(
            "kvdepot: secondary tier of %s: chunks of %d bytes, namespace %s",
            offloading_spec.config.model.name,
            self.block_size_bytes,
            self._room.namespace_id,
        )
        self._jobs = Jobs(self._room.move, self._counters)
        self._asker = Asker(
            self._room.lookup, lambda error: self._counters.trouble("miss_error", f"a lookup failed: {error!r}")
        )
        self._answers: dict[str, Answers] = {}
        self._requests: set[str] = set()
        self._ran: set[str] = set()
        self._of_before: set[str] = set()
        self._loads: dict[int, str] = {}
        self._promised: set[str] = set()
        self._unflushed = False
        self._patience_s = STEP_WAIT_S
        self._late_s = max(LATE_S, 2 * options.config.call_timeout_ms / 1e3)
        self._closed = False

    # Questions.

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """Returns whether the depot has a chunk; ``RETRY`` while the answer is pending."""
        try:
            result = self._lookup(bytes(key), req_context)
        except BaseException as error:  # nothing is raised into vLLM: its engine would end
            if not is_failure(error):
                raise
            self._counters.trouble("miss_error", f"a lookup failed: {error!r}")
            result = LookupResult.MISS
        if result is LookupResult.MISS and get_offload_group_idx(key) in self._windowed:
            # vLLM looks up windows after the full groups. To make room for a hit, it may evict a chunk that was a hit
            # a moment ago, and at a miss of a window it forgets that a load is pending. It would then load the evicted
            # chunk, which ends the engine. So the request is deferred to a step without loads.
            answers = self._answers.get(req_context.req_id)
            if answers is not None and answers.promised:
                return LookupResult.RETRY
        return result

    def _lookup(self, key: bytes, req_context: Any) -> LookupResult:
        if self._unflushed:
            self._counters.trouble("miss_after_reset", "after a reset, nothing is loaded until a chunk has been stored")
            return LookupResult.MISS
        answers = self._answers.get(req_context.req_id)
        if answers is None:
            answers = self._answers[req_context.req_id] = Answers(self._late_s, self._chunk_count)
        now_s = time.monotonic()
        verdict = answers.of(key, now_s)
        if verdict is Verdict.UNASKED:
            if not self._room.attached:
                self._counters.trouble("miss_no_depot", f"no depot answers: {self._room.trouble}")
                return LookupResult.MISS
            positions = getattr(req_context, "_offload_key_positions", None)
            batch = answers.ask(key, positions if isinstance(positions, dict) else {}, now_s)
            self._asker.ask(batch)
            # Most answers take less than a millisecond. Waiting for them saves the request a step of the engine.
            if self._patience_s > 0:
                batch.done.wait(self._patience_s)
                self._patience_s -= time.monotonic() - now_s
            verdict = answers.of(key, now_s)
        if verdict is Verdict.WAITING:
            return LookupResult.RETRY
        if verdict is Verdict.LATE:
            self._counters.trouble("miss_late", f"the depot has not answered a lookup within {self._late_s:g} s")
        if verdict is not Verdict.THERE:
            return LookupResult.MISS
        self._promised.add(req_context.req_id)
        return LookupResult.HIT

    # Chunks.

    def submit_store(self, job_metadata: Any) -> None:
        """Starts to store chunks."""
        # vLLM offers no chunk whose copy from the GPU was queued before the last reset. So the workers have run a step
        # since then, which first waited for all earlier copies.
        self._unflushed = False
        self._note_run([job_metadata.req_context.req_id])
        if job_metadata.req_context.req_id in self._of_before:
            count = len(job_metadata.keys)
            self._counters.trouble("dump_before_reset", "chunks of a request from before a reset are not stored", count)
            self._jobs.refuse(job_metadata.job_id, "dump", _keys(job_metadata.keys))
            return
        self._submit("dump", job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        """Starts to load chunks."""
        req_id = job_metadata.req_context.req_id
        self._loads[job_metadata.job_id] = req_id
        self._note_run([req_id])
        answers = self._answers.get(req_id)
        if answers is not None:
            self._guarded(lambda: answers.accepted(_keys(job_metadata.keys)))
        self._submit("load", job_metadata)

    def _submit(self, verb: Verb, job: Any) -> None:
        keys = _keys(job.keys)
        try:
            rows = np.asarray(job.chunk_ids, dtype=np.uint64)
            addresses = np.uint64(self._base) + rows * np.uint64(self.block_size_bytes)
            self._jobs.start(job.job_id, verb, keys, addresses, time.monotonic())
        except BaseException as error:
            if not is_failure(error):
                raise
            self._counters.trouble(f"{verb}_error", f"a {verb} failed: {error!r}", len(keys))
            self._jobs.refuse(job.job_id, verb, keys)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Returns the jobs that ended since the last call. Nothing accesses their chunks any more."""
        ended = self._guarded(lambda: self._jobs.ended(time.monotonic())) or []
        return [self._result(one) for one in ended]

    def _result(self, ended: Ended) -> JobResult:
        lost = set(ended.failed)
        good = [key for key in ended.keys if key not in lost]
        if ended.verb == "load":
            self._guarded(lambda: self._note_load(ended, good))
        return JobResult(
            job_id=ended.job_id,
            success=not lost,
            successful_keys=good if ended.verb == "load" and lost else None,
            transfer_time=ended.seconds,
            transfer_bytes=len(good) * self.block_size_bytes,
        )

    def _note_load(self, ended: Ended, good: Sequence[bytes]) -> None:
        if ended.failed:
            # Requests that were told that the chunk is there must not retry forever.
            for one in self._answers.values():
                one.lost(ended.failed)
        answers = self._answers.get(self._loads.pop(ended.job_id, ""))
        if answers is not None:
            answers.loaded(good)

    def has_pending_work(self) -> bool:
        """Whether a job has not been reported: vLLM continues to step until then."""
        return len(self._jobs) > 0

    # Requests and steps.

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Remembers the request. Its chunks are stored as they are computed."""
        self._requests.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forgets the request."""
        self._answers.pop(req_context.req_id, None)
        self._requests.discard(req_context.req_id)
        self._ran.discard(req_context.req_id)
        self._of_before.discard(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Called at the end of each step."""
        self._patience_s = STEP_WAIT_S
        self._guarded(lambda: self._note_run(context.new_req_ids))
        self._guarded(lambda: self._end_step(context.preempted_req_ids))
        self._guarded(self._room.look)

    def _end_step(self, preempted: Iterable[str]) -> None:
        # vLLM has submitted the loads of this step.
        for req_id in self._promised & self._answers.keys():
            self._answers[req_id].step_over()
        self._promised.clear()
        for req_id in preempted:
            # It is looked up again, and has stored chunks since the last time.
            if req_id in self._answers:
                self._answers[req_id].restart()

    def _note_run(self, req_ids: Iterable[str]) -> None:
        """Notes that requests have begun: vLLM tells of a request when it is added, however long it waits then."""
        self._ran |= self._requests.intersection(req_ids)

    # Resets.

    def drain_jobs(self) -> None:
        """Waits for all copies, and handles the reset.

        vLLM drains secondary tiers only when it resets its offloaded cache, and tells them nothing else about it. The
        reason may be a change of weights, sleep, or a pause.
        """
        self._guarded(lambda: self._jobs.drain(time.monotonic()))
        self._counters.add("resets")
        self._answers.clear()
        self._promised.clear()
        # Requests that ran may have KV of the earlier weights. vLLM also offers all chunks again, by block IDs, and
        # blocks that have left a window may belong to other requests by now. So in an engine with windows those are
        # included that may have blocks for a load from vLLM's own memory, of which a tier learns nothing. Without
        # windows such a load does no harm: its blocks are in use, so vLLM has not reset its GPU's cache, and the
        # weights must not change.
        self._of_before |= self._requests if self._windowed else self._ran
        if not self._apart:
            # vLLM's workers may still copy to and from slots that vLLM reuses now, and would overwrite what is loaded
            # into them. With `apart` there is nothing to load.
            self._unflushed = True
            return
        if not self._room.go_apart():
            return
        logger.info(
            "kvdepot: vLLM has reset its offloaded cache: this engine uses a namespace of its own, %s, until it is "
            "restarted (on_reset: apart)",
            self._room.namespace_id,
        )

    def shutdown(self) -> None:
        """Waits for all copies, and detaches. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._guarded(lambda: self._jobs.drain(time.monotonic()))
        self._guarded(self._asker.close)
        self._guarded(self._room.close)
        logger.info("kvdepot: secondary tier closed: %s", self._counters.snapshot())

    # Metrics.

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        """Returns the tier's metrics in vLLM's ``/metrics``."""
        counts = [*metrics.PLAIN.values(), *metrics.KINDS.values()]
        found: dict[str, OffloadingMetricMetadata] = {
            count.name: OffloadingCounterMetadata(
                documentation=count.text, labelnames=("kind",) if count.by_kind else ()
            )
            for count in counts
        }
        found[metrics.ATTACHED] = OffloadingGaugeMetadata(documentation=metrics.ATTACHED_TEXT)
        return found

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Returns the counts since the last call; ``None`` if there are none."""
        return self._guarded(self._stats)

    def _stats(self) -> OffloadingConnectorStats | None:
        changes = self._changes.since(self._counters.snapshot())
        attached = self._room.attached
        if not changes and attached == self._told_attached:
            return None
        self._told_attached = attached
        stats = OffloadingConnectorStats()
        for name, labels, count in changes:
            stats.increase_counter(name, count, labels)
        stats.set_gauge(metrics.ATTACHED, int(attached))
        return stats

    def counts(self) -> dict[str, int]:
        """Returns all counts so far."""
        return self._counters.snapshot()

    def _guarded(self, call: Callable[[], _Result]) -> _Result | None:
        """Returns what ``call`` returns; ``None`` if it fails, which is counted and not raised into vLLM."""
        try:
            return call()
        except BaseException as error:
            if not is_failure(error):
                raise
            self._counters.trouble("errors", f"the tier continues after {error!r}")
            return None


def _keys(keys: Collection[Any]) -> Sequence[bytes]:
    return [bytes(key) for key in keys]


def _address(view: memoryview) -> int:
    """Returns the address of vLLM's chunks. Keeps no reference to the view, so that vLLM can release it.

    Raises:
        ConfigError: the chunks are not contiguous.
    """
    chunks = np.asarray(view)
    if chunks.ndim != 2 or not chunks.flags.c_contiguous or not chunks.flags.writeable:
        raise ConfigError(
            f"vLLM's memory of chunks has the unsupported shape {chunks.shape} and strides {chunks.strides}: use vLLM "
            "0.32, or KVDepotConnector"
        )
    return int(chunks.ctypes.data)
