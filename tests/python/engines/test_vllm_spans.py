"""OpenTelemetry spans of the vLLM connector: what an operator sees in the trace of a request."""

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import BLOCK, FakeDepot, FakeStore, FakeTask, Step, options, pages, request, scheduler
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvdepot.claim import ClaimTimes, TierReads
from kvdepot.engines import spans as module
from kvdepot.engines.spans import Spans
from kvdepot.engines.vllm import compute
from kvdepot.engines.vllm.compute import ComputeOrder
from kvdepot.engines.vllm.loads import Loads
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.meta import Blocks, Load, LoadReport
from kvdepot.engines.vllm.request_spans import SchedulerSpans, WorkerSpans
from kvdepot.engines.vllm.saves import Saves
from kvdepot.engines.vllm.shares import Share
from kvdepot.engines.vllm.stats import DepotStats

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
PAGES = [1, 2, 3, 4]


class Seen:
    """A tracer provider that keeps all spans in memory."""

    def __init__(self) -> None:
        self._kept = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.spans = Spans(provider.get_tracer("kvdepot"), connector_logger())

    def take(self) -> list[ReadableSpan]:
        found = list(self._kept.get_finished_spans())
        self._kept.clear()
        return found

    def one(self) -> ReadableSpan:
        (span,) = self.take()
        return span


@pytest.fixture(autouse=True)
def _processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_cuda", lambda: None)


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def provider() -> Iterator[Any]:
    """Sets the tracer provider of this process, and forgets it at the end, as the library's own tests do."""
    before = trace._TRACER_PROVIDER

    def set_provider(made: Any) -> None:
        trace._TRACER_PROVIDER = made

    yield set_provider
    trace._TRACER_PROVIDER = before


def traced(name: str = "r", headers: Any = SAMPLED, tokens: int = 4 * BLOCK) -> Any:
    return SimpleNamespace(**vars(request(name, tokens)), trace_headers=headers)


def side_with(seen: Seen, depot: Any, **values: Any) -> Any:
    made = scheduler(depot, **values)
    made._spans = SchedulerSpans(seen.spans)
    return made


def ids(span: ReadableSpan) -> tuple[str, str]:
    """Returns trace and parent as the headers write them."""
    assert span.context is not None
    parent = f"{span.parent.span_id:016x}" if span.parent is not None else ""
    return f"{span.context.trace_id:032x}", parent


def own_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def told(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


# The scheduler.


def test_a_hit_is_a_lookup_and_a_load_in_the_trace_of_the_caller(seen: Seen) -> None:
    side, req = side_with(seen, FakeDepot(units=9)), traced()
    tokens, _ = side.match(req, 0)
    lookup = seen.one()
    assert (lookup.name, ids(lookup)) == ("kvdepot.lookup", (TRACE, CALLER))
    assert told(lookup) == {
        "kvdepot.request.id": "r",
        "kvdepot.local_tokens": 0,
        "kvdepot.asked_tokens": 3 * BLOCK,
        "kvdepot.hit_tokens": 3 * BLOCK,
        "kvdepot.tier_tokens": 0,
        "kvdepot.declined_tokens": 0,
    }
    side.allocated(req, pages(PAGES), tokens)
    (load,) = side.build_step(Step().starts("r", tokens, BLOCK, PAGES).output()).loads
    assert seen.take() == [], "it has not ended"
    side.reported(LoadReport({load.load_id: 1}))
    span = seen.one()
    assert (span.name, ids(span)) == ("kvdepot.load", (TRACE, CALLER))
    assert told(span)["kvdepot.load_tokens"] == 3 * BLOCK
    assert load.trace["traceparent"].startswith(f"00-{TRACE}-{own_id(span)}-"), "workers continue the load"
    assert span.status.is_unset


MS = 1_000_000


def times_of(span: ReadableSpan) -> tuple[int, int]:
    """Returns when a span began and ended, in ns since the epoch."""
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def begin_load(seen: Seen, side: Any, req: Any) -> tuple[ReadableSpan, Load]:
    """Has a request hit. Returns the span of its lookup, and its load."""
    tokens, _ = side.match(req, 0)
    lookup = seen.one()
    side.allocated(req, pages(PAGES), tokens)
    (load,) = side.build_step(Step().starts("r", tokens, BLOCK, PAGES).output()).loads
    return lookup, load


def test_what_the_depot_did_for_a_hit_is_below_its_lookup(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    depot = FakeDepot(units=9)
    side, req = side_with(seen, depot), traced()
    lookup, load = begin_load(seen, side, req)
    tiers = (TierReads("Posix", 2, 60 * MS, 40 * MS), TierReads("Object", 1, 30 * MS, 30 * MS))
    depot.claims[0].told_times = ClaimTimes(100 * MS, 80 * MS, 30 * MS, True, tiers)
    now_ns = 10**18
    monkeypatch.setattr("time.time_ns", lambda: now_ns)
    side.reported(LoadReport({load.load_id: 1}))
    assert depot.claims[0].released
    found = {told(span).get("kvdepot.tier", span.name): span for span in seen.take()}
    assert set(found) == {"kvdepot.depot.find", "kvdepot.depot.fetch", "Posix", "Object", "kvdepot.load"}
    find, fetch = found["kvdepot.depot.find"], found["kvdepot.depot.fetch"]
    assert ids(find) == ids(fetch) == (TRACE, own_id(lookup))
    assert times_of(find) == (now_ns - 100 * MS, now_ns - 80 * MS)
    assert times_of(fetch) == (now_ns - 80 * MS, now_ns - 30 * MS)
    assert told(find) == {"kvdepot.request.id": "r", "kvdepot.queued": True}
    assert told(fetch)["kvdepot.blocks"] == 3
    for name, blocks, first_ms, ago_ns in (("Posix", 2, 20.0, 40 * MS), ("Object", 1, 50.0, 30 * MS)):
        span = found[name]
        assert span.name == "kvdepot.tier.read"
        assert ids(span) == (TRACE, own_id(fetch))
        assert times_of(span) == (now_ns - 80 * MS, now_ns - ago_ns)
        assert (told(span)["kvdepot.blocks"], told(span)["kvdepot.first_block_ms"]) == (blocks, first_ms)


class TimedDepot(FakeDepot):
    """Tells these times of every claim."""

    def __init__(self, units: int, settled_ns: int | None) -> None:
        super().__init__(units, settled=settled_ns is not None)
        self._settled_ns = settled_ns

    def claim(self, groups: Any, hashes: Any, **how: Any) -> Any:
        made = super().claim(groups, hashes, **how)
        made.told_times = ClaimTimes(100 * MS, None, self._settled_ns, False, ())
        return made


@pytest.mark.parametrize("headers", [SAMPLED, None])
@pytest.mark.parametrize("settled_ns", [20 * MS, None])
def test_a_miss_or_an_aborted_claim_has_no_fetch(seen: Seen, settled_ns: int | None, headers: Any) -> None:
    side, req = side_with(seen, TimedDepot(0, settled_ns)), traced(headers=headers)
    side.match(req, 0)
    side.finished("r")
    lookup, find = seen.take()
    assert (lookup.name, find.name) == ("kvdepot.lookup", "kvdepot.depot.find")
    assert ids(find) == (ids(lookup)[0], own_id(lookup))
    begun_ns, ended_ns = times_of(find)
    assert ended_ns - begun_ns == 100 * MS - (settled_ns or 0)


def test_an_answer_that_is_not_told_again_has_no_spans_of_the_depot(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = TimedDepot(0, 20 * MS)
    side, req = side_with(seen, depot), traced()
    side.match(req, 0)
    assert [span.name for span in seen.take()] == ["kvdepot.lookup", "kvdepot.depot.find"]
    monkeypatch.setattr("kvdepot.engines.vllm.scheduler.MISS_RECHECK_S", 0.0)
    side.match(req, 0)
    assert len(depot.claims) == 2, "it was asked again"
    assert depot.claims[1].times_asked == 0
    assert seen.take() == []


def test_a_failed_load_keeps_its_lookup_after_another_one(seen: Seen) -> None:
    depot = FakeDepot(units=9)
    side, req = side_with(seen, depot), traced()
    first, load = begin_load(seen, side, req)
    side.match(req, 0)
    depot.claims[0].told_times = ClaimTimes(100 * MS, 80 * MS, 30 * MS, True, ())
    side.reported(LoadReport({load.load_id: 1}))
    spans = {span.name: span for span in seen.take()}
    assert ids(spans["kvdepot.depot.find"]) == (TRACE, own_id(first))


def test_the_depot_is_asked_for_times_only_if_the_trace_is_sampled(seen: Seen) -> None:
    depot = FakeDepot(units=0)
    side, req = side_with(seen, depot), traced(headers={"traceparent": f"00-{TRACE}-{CALLER}-00"})
    side.match(req, 0)
    assert depot.claims[0].released
    assert depot.claims[0].times_asked == 0


def test_a_miss_says_why_and_a_request_without_headers_begins_a_trace(seen: Seen) -> None:
    side, req = side_with(seen, FakeDepot(units=0)), traced(headers=None)
    assert side.match(req, 0) == (0, False)
    lookup = seen.one()
    assert lookup.parent is None
    assert (told(lookup)["kvdepot.miss_reason"], told(lookup)["kvdepot.hit_tokens"]) == ("unknown", 0)
    side.allocated(req, pages(PAGES), 0)
    step = side.build_step(Step().starts("r", 0, 4 * BLOCK, PAGES).output())
    (carrier,) = step.saves[0].traces
    assert carrier["traceparent"].startswith(f"00-{ids(lookup)[0]}-{own_id(lookup)}-"), "dumps are its children"


def test_a_lookup_lasts_from_the_first_question_to_the_answer_and_is_told_once(seen: Seen) -> None:
    depot = FakeDepot(units=9, settled=False)
    side, req = side_with(seen, depot), traced()
    assert side.match(req, 0)[0] is None
    asked_ns = side._requests["r"].trace.asked_ns
    assert side.match(req, 0)[0] is None
    assert seen.take() == []
    depot.claims[0].settled = True
    for _ in range(3):  # vLLM asks at every step while the request waits for pages
        assert side.match(req, 0)[0] == 3 * BLOCK
    lookup = seen.one()
    assert lookup.start_time == asked_ns
    assert lookup.end_time is not None
    assert lookup.end_time > asked_ns


def test_another_answer_is_another_lookup_and_so_is_the_same_one_after_a_preemption(seen: Seen) -> None:
    side, req = side_with(seen, FakeDepot(units=9)), traced()
    for local in (0, BLOCK):
        side.match(req, local)
    assert [told(span)["kvdepot.hit_tokens"] for span in seen.take()] == [3 * BLOCK, 2 * BLOCK]
    side.allocated(req, pages(PAGES), 2 * BLOCK)
    side.match(req, BLOCK)
    assert told(seen.one())["kvdepot.hit_tokens"] == 2 * BLOCK


def test_a_request_that_ends_before_its_answer_has_a_lookup_that_says_so(seen: Seen) -> None:
    side, req = side_with(seen, FakeDepot(units=9, settled=False)), traced()
    side.match(req, 0)
    side.finished("r")
    assert told(seen.one()) == {"kvdepot.request.id": "r", "kvdepot.miss_reason": "aborted"}
    side.finished("r")
    assert seen.take() == []


def test_a_failed_load_is_an_error_and_ends_once(seen: Seen) -> None:
    side, req = side_with(seen, FakeDepot(units=9), ranks=2), traced()
    side.allocated(req, pages(PAGES), side.match(req, 0)[0])
    (load,) = side.build_step(Step().starts("r", 3 * BLOCK, BLOCK, PAGES).output()).loads
    seen.take()
    side.reported(LoadReport({load.load_id: 1}, failed={load.load_id}))
    span = seen.one()
    assert (told(span)["error.type"], span.status.status_code) == ("incomplete", trace.StatusCode.ERROR)
    side.reported(LoadReport({load.load_id: 1}))
    assert seen.take() == []


def test_a_trace_that_is_not_sampled_costs_workers_nothing(seen: Seen) -> None:
    side, req = side_with(seen, FakeDepot(units=0)), traced(headers={"traceparent": f"00-{TRACE}-{CALLER}-00"})
    side.allocated(req, pages(PAGES), side.match(req, 0)[0])
    assert side.build_step(Step().starts("r", 0, 4 * BLOCK, PAGES).output()).saves[0].traces == []
    assert seen.take() == []


@pytest.mark.parametrize("headers", [{}, {"traceparent": "garbage"}, {"tracestate": "a=b"}, {"traceparent": ""}])
def test_headers_that_name_no_trace_are_no_headers(seen: Seen, headers: dict[str, str]) -> None:
    side_with(seen, FakeDepot()).match(traced(headers=headers), 0)
    assert seen.one().parent is None


def test_without_a_provider_nothing_is_noted_and_nothing_is_sent_to_workers() -> None:
    side, req = scheduler(FakeDepot(units=1)), traced()
    side.allocated(req, pages(PAGES), side.match(req, 0)[0])
    step = side.build_step(Step().starts("r", BLOCK, 3 * BLOCK, PAGES).output())
    assert side._requests["r"].trace is None
    assert [load.trace for load in step.loads] == [None]


# The workers.


def worker_parts(seen: Seen, task: FakeTask, **store: Any) -> tuple[Loads, Saves]:
    order, stats, spans = ComputeOrder(event_sync=True), DepotStats(), WorkerSpans(seen.spans)
    spans.rank = 3
    stores: Any = {0: FakeStore(next_task=task, **store)}
    loads = Loads(stores, options(), stats, recompute_by_block=True, order=order, spans=spans)
    return loads, Saves(stores, order, stats, spans)


def blocks(*page_ids: int, traces: Any = ()) -> Blocks:
    return Blocks([bytes([page]) for page in page_ids], list(page_ids), list(traces))


@pytest.mark.parametrize("before_forward", [True, False])
def test_each_rank_writes_a_copy_below_the_load(seen: Seen, before_forward: bool) -> None:
    loads, _ = worker_parts(seen, FakeTask(failed=(1,)))
    traced_one = Load(1, "r", before_forward, {0: blocks(7, 8)}, SAMPLED)
    loads.start([traced_one, Load(2, "untraced", before_forward, {0: blocks(9, 10)})])
    loads.finish_before_forward()
    loads.finished()
    span = seen.one()
    assert (span.name, ids(span)) == ("kvdepot.copy", (TRACE, CALLER))
    assert told(span) == {
        "kvdepot.request.id": "r",
        "kvdepot.rank": 3,
        "kvdepot.blocks": 2,
        "kvdepot.bytes": 200,
        "kvdepot.failed_blocks": 1,
        "error.type": "incomplete",
    }


def test_a_dump_is_in_the_trace_of_its_first_request_and_names_the_others(seen: Seen) -> None:
    _, saves = worker_parts(seen, FakeTask(failed=(0,)), share=Share(0, 1))
    other = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "tracestate": "a=b"}
    saves.finish_step({0: blocks(1, 2, 3, traces=[SAMPLED, other, SAMPLED])})
    span = seen.one()
    assert (span.name, ids(span)) == ("kvdepot.dump", (TRACE, CALLER))
    assert [f"{link.context.trace_id:032x}" for link in span.links] == ["1" * 32]
    assert told(span) == {
        "kvdepot.rank": 3,
        "kvdepot.group": 0,
        "kvdepot.blocks": 2,
        "kvdepot.bytes": 200,
        "kvdepot.requests": 2,
        "error.type": "timeout",
    }


def test_dumps_of_untraced_requests_write_nothing_and_links_are_bounded(seen: Seen) -> None:
    _, saves = worker_parts(seen, FakeTask())
    saves.finish_step({0: blocks(1)})
    assert seen.take() == []
    many = [{"traceparent": f"00-{number:032x}-{'2' * 16}-01"} for number in range(1, 1000)]
    saves.finish_step({0: blocks(1, traces=many)})
    assert len(seen.one().links) == module.LINKS_MAX


def test_a_step_of_few_blocks_keeps_its_traces_on_every_rank_that_shares_them() -> None:
    shared = [Share(index, 2).of(blocks(1, 2, traces=[SAMPLED])) for index in range(2)]
    assert [len(one.pages) for one in shared] == [1, 1]
    assert all(one.traces == [SAMPLED] for one in shared)


# When they are on, and what a failure costs.


def test_spans_are_on_if_the_process_has_a_tracer_provider(provider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    provider(None)
    assert Spans.of_process(connector_logger()) is None
    provider(trace.NoOpTracerProvider())
    assert Spans.of_process(connector_logger()) is None
    provider(TracerProvider())
    assert SchedulerSpans.of_process() is not None
    assert WorkerSpans.of_process() is not None
    for disabled in ("kvdepot", "redis, kvdepot", "*"):
        monkeypatch.setenv(module.DISABLED, disabled)
        assert SchedulerSpans.of_process() is None
    monkeypatch.setenv(module.DISABLED, "redis")
    assert SchedulerSpans.of_process() is not None


def test_the_sdk_can_be_disabled_as_a_whole(provider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    provider(TracerProvider())
    assert Spans.of_process(connector_logger()) is None


def test_a_process_that_has_not_imported_the_library_does_not_do_so_for_us() -> None:
    script = (
        "import sys, logging\n"
        "from kvdepot.engines.spans import Spans\n"
        "assert Spans.of_process(logging.getLogger()) is None\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_tracer_that_fails_ends_tracing_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        calls = 0

        def start_span(self, *args: Any, **named: Any) -> Any:
            self.calls += 1
            raise RuntimeError("no memory")

    broken: Any = Broken()
    side = scheduler(FakeDepot(units=9))
    side._spans = SchedulerSpans(Spans(broken, connector_logger()))
    for name in ("a", "b"):
        req = traced(name)
        side.allocated(req, pages(PAGES), side.match(req, 0)[0] or 0)
        (load,) = side.build_step(Step().starts(name, 3 * BLOCK, BLOCK, PAGES).output()).loads
        assert load.trace is None
        side.reported(LoadReport({load.load_id: 1}))
        side.finished(name)
    assert broken.calls == 1
    assert [record.message for record in caplog.records if "no more spans" in record.message] != []
