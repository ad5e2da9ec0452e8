"""The connector's OpenTelemetry spans: what they are called, and what they tell.

The scheduler knows a request's trace, from the headers that vLLM keeps with it. Workers are given it with their work.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdepot.engines.spans import Carrier, Spans
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.lookup import Hit, Miss
from kvdepot.engines.vllm.meta import Blocks, Load

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

    from kvdepot import Claim
    from kvdepot.claim import ClaimTimes

LOOKUP = "kvdepot.lookup"
LOAD = "kvdepot.load"
COPY = "kvdepot.copy"
DUMP = "kvdepot.dump"
DEPOT_FIND = "kvdepot.depot.find"
DEPOT_FETCH = "kvdepot.depot.fetch"
TIER_READ = "kvdepot.tier.read"
REQUEST_ID = "kvdepot.request.id"


@dataclass
class RequestTrace:
    """What the spans of one request share.

    Attributes:
        request_id: the request's name in vLLM's log and for ``kvdepot why``.
        parent: context of its spans: that of its headers, else its first span's.
        carrier: the same for workers; ``None`` if the trace is not sampled.
        asked_ns: when the lookup that has no answer yet was asked for first, in ns since the epoch; 0 = there is none.
        told: answer of the last span; the same one again, while the request waits for admission, gets no other span.
        claim: its last claim, which the next lookup's span is about.
    """

    request_id: str
    parent: "Context | None"
    carrier: Carrier | None
    asked_ns: int = 0
    told: Hit | Miss | None = None
    claim: "ClaimSpans | None" = None


class SchedulerSpans:
    """Spans of lookups and loads, in the scheduler's process."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    @staticmethod
    def of_process() -> "SchedulerSpans | None":
        """Returns ``None`` if this process has no tracer provider."""
        spans = Spans.of_process(connector_logger())
        return SchedulerSpans(spans) if spans is not None else None

    def request(self, request: Any) -> RequestTrace:
        """Returns the trace of a request that vLLM has announced."""
        parent = self._spans.parent(getattr(request, "trace_headers", None))
        return RequestTrace(request.request_id, parent, self._spans.carrier(parent))

    def asked(self, trace: RequestTrace | None) -> None:
        """Notes that vLLM asks for the request's hit; a lookup lasts from its first question to its answer."""
        if trace is not None and not trace.asked_ns:
            trace.asked_ns = time.time_ns()

    def answered(self, trace: RequestTrace | None, answer: Hit | Miss, local_tokens: int, asked_tokens: int) -> None:
        """Writes the span of a lookup, unless the last one told the same.

        Args:
            trace: the request's.
            answer: what vLLM is told.
            local_tokens: tokens of the request that vLLM has itself.
            asked_tokens: tokens that the depot was last asked for; 0 = it was not asked.
        """
        if trace is None:
            return
        begun_ns, trace.asked_ns = trace.asked_ns, 0
        if answer != trace.told:
            trace.told = answer
            hit = answer if isinstance(answer, Hit) else Hit(0, 0)
            reason = answer.reason if isinstance(answer, Miss) else None
            self._looked_up(
                trace,
                begun_ns,
                {
                    "kvdepot.local_tokens": local_tokens,
                    "kvdepot.asked_tokens": asked_tokens,
                    "kvdepot.hit_tokens": hit.tokens,
                    "kvdepot.tier_tokens": hit.tier_tokens,
                    "kvdepot.declined_tokens": answer.declined_tokens,
                    "kvdepot.miss_reason": reason,
                },
            )

    def _looked_up(self, trace: RequestTrace, begun_ns: int, attributes: dict[str, Any]) -> None:
        context = self._spans.write(LOOKUP, begun_ns, trace.parent, {REQUEST_ID: trace.request_id, **attributes})
        if trace.claim is not None:
            trace.claim.lookup = context
        if trace.parent is None:
            trace.parent, trace.carrier = context, self._spans.carrier(context)

    def claims(self, trace: RequestTrace | None) -> "ClaimSpans | None":
        """Returns the spans of a claim that was made for a request."""
        if trace is None:
            return None
        trace.claim = ClaimSpans(self._spans, trace)
        return trace.claim

    def load_begun(self, trace: RequestTrace | None, load: Load, tokens: int, tier_tokens: int) -> "Span | None":
        """Begins the span of a load, from its plan until all ranks have reported it, and names it to the workers."""
        if trace is None:
            return None
        trace.told = None  # after a preemption the same answer is a new one
        attributes = {
            REQUEST_ID: trace.request_id,
            "kvdepot.load_tokens": tokens,
            "kvdepot.tier_tokens": tier_tokens,
            "kvdepot.before_forward": load.before_forward,
        }
        span = self._spans.begin(LOAD, trace.parent, attributes)
        load.trace = self._spans.carrier(span)
        return span

    def load_ended(self, span: "Span | None", failed: str = "") -> None:
        """Ends the span of a load; ``failed``: why the request is computed after all."""
        self._spans.end(span, failed)

    def finished(self, trace: RequestTrace | None) -> None:
        """Writes the span of a lookup that ends without an answer, because its request does."""
        if trace is not None and trace.asked_ns:
            self._looked_up(trace, trace.asked_ns, {"kvdepot.miss_reason": "aborted"})
            trace.asked_ns = 0


class ClaimSpans:
    """Spans of what the depot did for a claim, below the lookup that it answered.

    Attributes:
        lookup: context of the lookup's span; ``None`` = none was written, then none of the depot is.
    """

    def __init__(self, spans: Spans, trace: RequestTrace) -> None:
        self._spans = spans
        self._trace = trace
        self.lookup: Context | None = None

    def release(self, claim: "Claim", tells_reads: bool = False) -> "ClaimTimes | None":
        """Releases the claim, and writes its spans if the trace is sampled. Returns the times, if asked."""
        sampled = self.lookup is not None and self._trace.carrier is not None
        asked_ns = time.time_ns()
        times = claim.release(tell_times=sampled or tells_reads)
        if times is not None and sampled:
            self._write(times, asked_ns)
        return times

    def _write(self, times: "ClaimTimes", asked_ns: int) -> None:
        # The depot answered somewhere in between.
        now_ns = (asked_ns + time.time_ns()) // 2
        opened_ns, admitted_ns, settled_ns, queued, tiers = times
        request = {REQUEST_ID: self._trace.request_id}
        found_ns = next((ago_ns for ago_ns in (admitted_ns, settled_ns) if ago_ns is not None), 0)
        found = {**request, "kvdepot.queued": queued}
        self._spans.write(DEPOT_FIND, now_ns - opened_ns, self.lookup, found, ended_ns=now_ns - found_ns)
        if not tiers or admitted_ns is None:
            return
        begun_ns, ended_ns = now_ns - admitted_ns, now_ns - min(last for _, _, _, last in tiers)
        blocks = {**request, "kvdepot.blocks": sum(count for _, count, _, _ in tiers)}
        fetch = self._spans.write(DEPOT_FETCH, begun_ns, self.lookup, blocks, ended_ns=ended_ns)
        for name, count, first_ns, last_ns in tiers:
            first_ms = (admitted_ns - first_ns) / 1e6
            read = {**request, "kvdepot.tier": name, "kvdepot.blocks": count, "kvdepot.first_block_ms": first_ms}
            self._spans.write(TIER_READ, begun_ns, fetch, read, ended_ns=now_ns - last_ns)


class WorkerSpans:
    """Spans of copies, in a worker's process.

    Attributes:
        rank: number of the worker in the engine.
    """

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._begun_ns: dict[int, int] = {}
        self.rank = 0

    @staticmethod
    def of_process() -> "WorkerSpans | None":
        """Returns ``None`` if this process has no tracer provider."""
        spans = Spans.of_process(connector_logger())
        return WorkerSpans(spans) if spans is not None else None

    def loads_begun(self, loads: Iterable[Load]) -> None:
        """Notes when loads began."""
        now_ns = time.time_ns()
        self._begun_ns.update({load.load_id: now_ns for load in loads if load.trace is not None})

    def load_ended(self, load: Load, failed_blocks: int, block_bytes: dict[int, int]) -> None:
        """Writes the span of this rank's part of a load; ``block_bytes``: by group of this rank."""
        begun_ns = self._begun_ns.pop(load.load_id, None)
        if begun_ns is None:
            return
        sizes = {index: len(blocks.pages) for index, blocks in load.blocks.items() if index in block_bytes}
        attributes = {
            REQUEST_ID: load.request_id,
            "kvdepot.rank": self.rank,
            "kvdepot.blocks": sum(sizes.values()),
            "kvdepot.bytes": sum(count * block_bytes[index] for index, count in sizes.items()),
            "kvdepot.failed_blocks": failed_blocks,
        }
        failure = "incomplete" if failed_blocks else ""
        self._spans.write(COPY, begun_ns, self._spans.parent(load.trace), attributes, failure=failure)

    def dump_begun(self, blocks: Blocks) -> int:
        """Returns when a dump of these blocks began, in ns since the epoch; 0 if none of their requests is traced."""
        return time.time_ns() if blocks.traces else 0

    def dump_ended(
        self,
        begun_ns: int,
        traces: list[Carrier],
        group: int,
        blocks: int,
        block_bytes: int,
        failures: Mapping[str, int],
    ) -> None:
        """Writes the span of a dump: a child of its first traced request's, with links to the others."""
        if not begun_ns:
            return
        traces = list({one["traceparent"]: one for one in traces}.values())
        attributes = {
            "kvdepot.rank": self.rank,
            "kvdepot.group": group,
            "kvdepot.blocks": blocks,
            "kvdepot.bytes": blocks * block_bytes,
            "kvdepot.requests": len(traces),
        }
        failure = next(iter(failures), "")
        parent = self._spans.parent(traces[0])
        self._spans.write(DUMP, begun_ns, parent, attributes, failure=failure, others=traces[1:])
