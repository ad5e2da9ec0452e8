"""The workers' side of the vLLM connector: what waits for which copies, and how failures are reported."""

import gc
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from engine_parts import BLOCK, FakeStore, FakeTask, geometry, options

from kvdepot.engines.vllm import compute
from kvdepot.engines.vllm.groups import Geometry
from kvdepot.engines.vllm.loads import STEP_PATIENCE_MS, Loads
from kvdepot.engines.vllm.meta import Blocks, Load, StepMetadata
from kvdepot.engines.vllm.saves import Saves
from kvdepot.engines.vllm.shares import Share
from kvdepot.engines.vllm.stats import DepotStats
from kvdepot.engines.vllm.step_order import StepOrder, step_order
from kvdepot.engines.vllm.worker import WorkerSide


class FakeEvent:
    """An event of a device: its handle counts the events recorded before it."""

    recorded = 0
    alive: ClassVar["weakref.WeakSet[FakeEvent]"] = weakref.WeakSet()

    def record(self, stream: Any) -> None:
        type(self).recorded += 1
        self.cuda_event = type(self).recorded
        self.alive.add(self)


class FakeStream:
    waits = 0
    cuda_stream = 77

    def synchronize(self) -> None:
        type(self).waits += 1


@pytest.fixture(autouse=True)
def _processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completes everything that was launched."""
    monkeypatch.setattr(compute, "_cuda", lambda: None)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes on a device whose kernels have only been launched."""
    FakeEvent.recorded, FakeStream.waits = 0, 0
    FakeEvent.alive.clear()
    monkeypatch.setattr(compute, "_cuda", lambda: SimpleNamespace(Event=FakeEvent, current_stream=FakeStream))


def blocks(*page_ids: int) -> Blocks:
    return Blocks([bytes([page]) for page in page_ids], list(page_ids))


def loads(store: FakeStore, by_block: bool = True) -> Loads:
    order = compute.ComputeOrder(event_sync=True)
    return Loads({0: store}, options(), DepotStats(), recompute_by_block=by_block, order=order)  # type: ignore[dict-item]


def waited(store: FakeStore) -> list[int]:
    """Shards that a device was made to wait for."""
    return [shard for shard, _ in store.next_task.streams]


def saves(store: FakeStore) -> Saves:
    return Saves({0: store}, compute.ComputeOrder(event_sync=True), DepotStats())  # type: ignore[dict-item]


def test_a_worker_tells_its_namespaces_once_and_each_witness() -> None:
    side = WorkerSide(None, options(), Geometry((), BLOCK, BLOCK, "no blocks"))  # type: ignore[arg-type]
    first = side.report()
    assert first is not None
    assert [rank.broken for rank in first.ranks] == ["no blocks"]
    assert side.report() is None
    side.finish_saves(StepMetadata(witness=7))
    told = side.report()
    assert told is not None
    assert (told.done, told.ranks) == ({7: 1}, [])
    side.finish_saves(StepMetadata())
    assert side.report() is None


def test_a_witness_outlives_a_step_that_reports_nothing() -> None:
    """With a draft vLLM asks for a step's report before the step has ended; a step without tokens may follow."""
    side = WorkerSide(None, options(), Geometry((), BLOCK, BLOCK, "no blocks"))  # type: ignore[arg-type]
    side.report()
    side.finish_saves(StepMetadata(witness=7, timed=3))
    side.finish_saves(StepMetadata(witness=8))
    side.finish_saves(StepMetadata())
    told = side.report()
    assert told is not None
    assert (told.done, told.timed) == ({7: 1, 8: 1}, 3)


def test_layers_are_saved_as_they_are_written_and_the_rest_at_the_end() -> None:
    store = FakeStore(layers=("a", "b", "c"))
    side = saves(store)
    step = {0: blocks(1, 2)}
    side.submit_layer("a", step)
    side.submit_layer("a", step)
    assert store.calls == [("begin", [1, 2])]
    assert store.next_task.shards == [0]
    side.finish_step(step)
    assert store.next_task.shards == [0, 1, 2]


def test_blocks_of_each_priority_are_a_dump_of_their_own() -> None:
    """Whole or layer by layer: both dumps of a step get all of their shards."""
    step = blocks(1, 2, 3)
    step.priorities = {1: "low"}
    store = FakeStore()
    saves(store).finish_step({0: step})
    assert (store.calls, store.priorities) == ([("dump", [1, 3]), ("dump", [2])], ["normal", "low"])
    store = FakeStore()
    side = saves(store)
    side.submit_layer("a", {0: step})
    side.finish_step({0: step})
    assert (store.calls, store.priorities) == ([("begin", [1, 3]), ("begin", [2])], ["normal", "low"])
    assert store.next_task.shards == [0, 0, 1, 1]


def test_blocks_keep_their_priorities_when_they_are_divided_and_joined() -> None:
    step = blocks(1, 2, 3, 4)
    step.priorities = {1: "low", 3: "high"}
    shares = [Share(index, 2).of(step) for index in range(2)]
    found = {page: share.priorities.get(at, "normal") for share in shares for at, page in enumerate(share.pages)}
    assert found == {1: "normal", 2: "low", 3: "normal", 4: "high"}
    joined = blocks(9)
    joined.extend(step)
    assert {priority: some.pages for priority, some in joined.by_priority()} == {
        "normal": [9, 1, 3],
        "low": [2],
        "high": [4],
    }


def test_a_graph_that_skips_the_hooks_saves_as_well() -> None:
    store = FakeStore()
    saves(store).finish_step({0: blocks(1)})
    assert store.calls == [("dump", [1])]


def test_ranks_with_equal_bytes_share_the_dumps() -> None:
    """Whole blocks and layer by layer alike; a rank without a block of a step starts no dump."""
    stores = [FakeStore(share=Share(index, 2)) for index in range(2)]
    for store in stores:
        side = saves(store)
        side.finish_step({0: blocks(1, 2, 3)})
        side.submit_layer("a", {0: blocks(4)})
        side.finish_step({0: blocks(4)})
    begun = [pages for store in stores for _, pages in store.calls]
    assert sorted(page for pages in begun for page in pages) == [1, 2, 3, 4]
    assert len(begun) == 3


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.usefixtures("device")
def test_a_dump_waits_on_the_device_for_what_was_launched(by_layer: bool) -> None:
    """The engine's thread goes on; the event outlives the copies that wait for it (P3)."""
    store = FakeStore(next_task=FakeTask(done=False))
    side = saves(store)
    if by_layer:
        side.submit_layer("b", {0: blocks(1)})
    side.finish_step({0: blocks(1)})
    assert store.next_task.shards == ([1, 0] if by_layer else [])
    assert store.next_task.events == ([1, 2] if by_layer else [1])
    assert FakeStream.waits == 0
    assert len(FakeEvent.alive) == FakeEvent.recorded
    store.next_task.is_done = True
    side.fence(set())
    gc.collect()
    assert len(FakeEvent.alive) == 0


@pytest.mark.usefixtures("device")
def test_without_event_sync_the_engine_waits_for_its_stream() -> None:
    store = FakeStore()
    side = Saves({0: store}, compute.ComputeOrder(event_sync=False), DepotStats())  # type: ignore[dict-item]
    side.finish_step({0: blocks(1)})
    assert (FakeStream.waits, FakeEvent.recorded, store.next_task.events) == (1, 0, [0])


@pytest.mark.usefixtures("device")
def test_a_load_waits_for_kernels_that_still_use_its_pages() -> None:
    store = FakeStore()
    loads(store).start([Load(1, "r", before_forward=True, blocks={0: blocks(1)})])
    assert store.next_task.events == [1]
    assert FakeStream.waits == 0


def test_pages_are_not_given_away_while_a_dump_reads_them() -> None:
    store = FakeStore(next_task=FakeTask(done=False))
    side = saves(store)
    side.finish_step({0: blocks(1, 2)})
    side.fence({3})
    assert store.next_task.waits == 0
    side.fence({2, 3})
    assert store.next_task.waits == 1


@pytest.mark.usefixtures("device")
def test_a_step_waits_for_layers_that_do_not_ask() -> None:
    """An indexer's cache is read without a hook, and so are all caches in a replayed graph."""
    store = FakeStore(layers=("a", "silent"))
    side = loads(store)
    load = Load(1, "r", before_forward=True, blocks={0: blocks(1)})
    side.start([load])
    assert waited(store) == [0, 1]
    side.wait_for_layer("a")
    side.finish_before_forward()
    store.next_task = FakeTask()
    side.start([load])
    assert waited(store) == [1]
    side.wait_for_layer("a")
    assert waited(store) == [1, 0]


@pytest.mark.usefixtures("device")
def test_kernels_wait_for_a_layer_on_the_device() -> None:
    store = FakeStore()
    side = loads(store)
    side.start([Load(1, "r", before_forward=True, blocks={0: blocks(1)})])
    side.wait_for_layer("b")
    assert store.next_task.streams == [(0, 77), (1, 77), (1, 77)]
    assert (store.next_task.shards, FakeStream.waits) == ([], 0)


def test_a_processor_waits_for_the_whole_load_before_it_computes() -> None:
    store = FakeStore()
    side = loads(store)
    side.start([Load(1, "r", before_forward=True, blocks={0: blocks(1)})])
    assert (store.next_task.waits, store.next_task.shards) == (1, [])


def test_a_step_has_an_end_to_its_patience_and_loads_between_steps_do_not() -> None:
    """A step that waits for a block of a slow tier delays every other request (P2)."""
    store = FakeStore()
    load = Load(1, "r", True, {0: blocks(1)})
    loads(store).start([load, Load(2, "s", False, {0: blocks(2)})])
    assert store.patience_ms == [STEP_PATIENCE_MS, None]


@pytest.mark.parametrize("by_block", [True, False])
def test_failed_blocks_are_said_in_the_terms_that_vllm_recovers_from(by_block: bool) -> None:
    store = FakeStore(next_task=FakeTask(failed=(1,)))
    side = loads(store, by_block)
    side.start([Load(7, "r", before_forward=False, blocks={0: blocks(4, 5)})])
    assert side.finished() == {"r"}
    assert side.take_failed_pages() == ({5} if by_block else set())
    assert side.take_failed_requests() == (set() if by_block else {"r"})
    report: Any = side.take_report()
    assert (report.done, report.failed) == ({7: 1}, {7})
    assert side.take_report() is None


def test_one_failed_block_fails_only_its_own_request() -> None:
    store = FakeStore(next_task=FakeTask(failed=(2,)))
    side = loads(store)
    side.start([Load(1, "r", True, {0: blocks(1, 2)}), Load(2, "s", True, {0: blocks(3)})])
    side.finish_before_forward()
    report: Any = side.take_report()
    assert (report.done, report.failed) == ({1: 1, 2: 1}, {2})
    assert side.take_failed_pages() == {3}


def test_a_load_that_is_given_up_keeps_its_pages_fenced() -> None:
    store = FakeStore(next_task=FakeTask(done=False))
    side = loads(store)
    side.start([Load(1, "r", True, {0: blocks(1)})])
    side.finish_before_forward()
    assert side.take_failed_pages() == {1}
    waits = store.next_task.waits
    side.fence({2})
    assert store.next_task.waits == waits
    side.fence({1})
    assert store.next_task.waits == waits + 1


def assert_bad_and_fenced(side: Loads, task: FakeTask) -> None:
    """The step's only load, of page 1, counts as failed, and its page as written to."""
    side.finish_before_forward()
    report: Any = side.take_report()
    assert (report.done, report.failed) == ({1: 1}, {1})
    assert side.take_failed_pages() == {1}
    task.is_done = False
    waits = task.waits
    side.fence({1})
    assert task.waits == waits + 1


def test_a_load_that_ends_after_the_forward_has_gone_on_without_it_has_failed() -> None:
    """The results used the pages' old bytes, so they must not be considered valid (P1)."""
    store = FakeStore(next_task=FakeTask(done=False))
    side = loads(store)
    side.start([Load(1, "r", True, {0: blocks(1)})])
    store.next_task.is_done = True
    assert_bad_and_fenced(side, store.next_task)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("layer", ["hooked", "silent"])
@pytest.mark.usefixtures("device")
def test_a_layer_that_was_not_there_in_time_spoils_the_load(layer: str, stream: bool) -> None:
    """Even if the task has ended successfully by the end of the step (P1); no other layer is waited for as long
    again."""
    store = FakeStore(layers=("hooked", "silent"))
    order = compute.ComputeOrder(event_sync=stream)
    side = Loads({0: store}, options(), DepotStats(), recompute_by_block=True, order=order)  # type: ignore[dict-item]
    for name in ("hooked",) if layer == "silent" else store.layers:
        side.wait_for_layer(name)  # an earlier step, which shows that the layer asks
    store.next_task.shards_in_time = False
    side.start([Load(1, "r", True, {0: blocks(1)})])
    for name in store.layers:
        side.wait_for_layer(name)
    assert len(store.next_task.streams) + len(store.next_task.shards) == 1
    assert_bad_and_fenced(side, store.next_task)


def worker(store: FakeStore, **order: bool) -> WorkerSide:
    depot: Any = SimpleNamespace(close=lambda: None)
    side = WorkerSide(depot, options(step_order=StepOrder(**order)), geometry())
    side._stores[0] = store  # type: ignore[assignment]
    store.set_decoding = lambda decoding: None  # type: ignore[attr-defined]
    return side


def step_of(side: WorkerSide, saved: Blocks, layers: tuple[str, ...], error: Exception | None = None) -> None:
    """Runs a step as vLLM does: ``wait_for_save`` is called in a ``finally``."""
    step = StepMetadata(saves={0: saved})
    side.prepare(step)
    try:
        for name in layers:
            side.save_layer(name, step)
        if error is not None:
            raise error
    finally:
        side.finish_saves(step)
        side.report()


def dropped(store: FakeStore) -> bool:
    """Returns whether the store's last task is unreferenced: then the core reclaims its slots."""
    task, store.next_task = weakref.ref(store.next_task), FakeTask()
    gc.collect()
    return task() is None


@pytest.mark.parametrize("layers", [(), ("a",)])
def test_nothing_is_sealed_of_a_step_whose_forward_broke_off(layers: tuple[str, ...]) -> None:
    """Layers that never ran hold old bytes, which would be served under a valid hash (P1); slots are reclaimed (P4)."""
    store = FakeStore(next_task=FakeTask(done=False))
    side = worker(store)
    with pytest.raises(MemoryError):
        step_of(side, blocks(1, 2), layers, MemoryError("no room for the next layer's output"))
    assert store.calls == ([("begin", [1, 2])] if layers else [])
    assert store.next_task.shards == ([0, 0] if layers else [])  # submitted, and waited for: nothing reads the pages
    assert store.next_task.waits == 0
    assert dropped(store)


def test_a_step_that_ended_without_a_word_hands_nothing_to_the_next() -> None:
    """vLLM's second model runner calls nothing after a failed forward (P1)."""
    store = FakeStore(next_task=FakeTask(done=False))
    side = worker(store)
    step = StepMetadata(saves={0: blocks(1, 2)})
    side.prepare(step)
    side.save_layer("a", step)
    first = store.next_task
    side.prepare(StepMetadata(fresh_pages=[1]))
    side.save_layer("b", step)
    assert (first.shards, first.waits) == ([0, 0], 0)
    del first
    assert dropped(store)


def test_nothing_is_stored_after_a_forward_that_broke_off_and_all_ranks_hear_of_it() -> None:
    """An engine that goes on computes on what the failed step left (P1)."""
    store = FakeStore()
    side = worker(store)
    with pytest.raises(MemoryError):
        step_of(side, blocks(1), ("a",), MemoryError())
    store.calls.clear()
    side.prepare(StepMetadata())
    side.save_layer("a", StepMetadata(saves={0: blocks(3)}))
    side.finish_saves(StepMetadata(saves={0: blocks(3)}))
    assert store.calls == []
    report = side.report()
    assert report is not None
    assert "broke off" in report.broken


def test_nothing_is_stored_after_a_forward_that_ended_without_a_word() -> None:
    """Whole blocks have no layers under way, and the failed step may have completed no block at all (P1)."""
    store = FakeStore()
    side = worker(store)
    side.prepare(StepMetadata())
    step = StepMetadata(saves={0: blocks(3)})
    side.prepare(step)
    side.finish_saves(step)
    assert store.calls == []
    report = side.report()
    assert report is not None
    assert "broke off" in report.broken


def test_loads_of_a_forward_that_ended_without_a_word_are_reported_and_fenced() -> None:
    """Their leases end (P4), and nobody is given a page that a load still writes to (P1)."""
    store = FakeStore(next_task=FakeTask(done=False))
    side = worker(store)
    step = StepMetadata(loads=[Load(1, "r", before_forward=True, blocks={0: blocks(1)})])
    side.prepare(step)
    side.start_loads(step)
    side.prepare(StepMetadata(fresh_pages=[1]))
    assert store.next_task.is_done
    report = side.report()
    assert report is not None
    assert (report.done, report.failed) == ({1: 1}, {1})


@pytest.mark.parametrize("clears_first", [True, False])
def test_no_dump_outlives_its_step_where_vllm_clears_pages_before_it_prepares_one(clears_first: bool) -> None:
    """The second runner would clear a page under a dump, which would store zeros under a valid hash (P1, P3)."""
    store = FakeStore(next_task=FakeTask(done=False))
    side = worker(store, clears_first=clears_first)
    step = StepMetadata(saves={0: blocks(1)})
    side.prepare(step)
    side.finish_saves(step)
    assert store.calls == [("dump", [1])]
    assert store.next_task.is_done is clears_first
    store.next_task = FakeTask(done=False)
    side.prepare(StepMetadata(late_saves={0: blocks(2)}))
    assert store.calls == [("dump", [1]), ("dump", [2])]
    assert store.next_task.is_done is clears_first  # if this step fails, nothing of it is called any more


def test_layers_that_run_once_for_each_microbatch_are_saved_when_the_step_has_ended() -> None:
    """At the first call of a layer's hook a part of the batch has not been computed (P1)."""
    store = FakeStore(layers=("a", "b"))
    side = worker(store, microbatches=True)
    step = StepMetadata(saves={0: blocks(1)})
    side.prepare(step)
    for name in ("a", "a", "b", "b"):
        side.save_layer(name, step)
    assert store.calls == []
    side.finish_saves(step)
    assert store.calls == [("dump", [1])]


def test_layers_are_saved_at_the_end_of_a_step_where_vllm_clears_pages_before_the_next_one_begins() -> None:
    """A forward that fails after its layers' hooks would leave a complete dump, which may read cleared pages (P1)."""
    store = FakeStore(layers=("a", "b"))
    side = worker(store, clears_first=True)
    step = StepMetadata(saves={0: blocks(1)})
    side.prepare(step)
    for name in ("a", "b"):
        side.save_layer(name, step)
    side.prepare(StepMetadata())
    assert store.calls == []


def test_a_step_without_tokens_ends_with_its_report() -> None:
    """vLLM 0.29 and 0.30 do not call ``wait_for_save`` for it: it has not failed."""
    store = FakeStore()
    side = worker(store)
    side.prepare(StepMetadata(computes=False))
    side.start_loads(StepMetadata(computes=False))
    side.finished_loads()
    side.report()
    step = StepMetadata(saves={0: blocks(1)})
    side.prepare(step)
    side.finish_saves(step)
    report = side.report()
    assert store.calls == [("dump", [1])]
    assert report is None or not report.broken


def registered(stage: int, monkeypatch: pytest.MonkeyPatch, store: FakeStore) -> WorkerSide:
    """A worker in one of two pipeline stages, of an engine that ends a step's saves after its draft."""

    def group(rank: int) -> Any:
        return lambda: SimpleNamespace(rank_in_group=rank)

    groups = SimpleNamespace(get_pp_group=group(stage), get_tp_group=group(0))
    monkeypatch.setattr(sys.modules["vllm.distributed"], "parallel_state", groups, raising=False)
    monkeypatch.setattr(WorkerSide, "_open_stores", lambda *_: None)
    monkeypatch.setattr(WorkerSide, "_proves", lambda _: True)
    side = worker(store, defers_saves=True)
    sizes = {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(**sizes), model_config=SimpleNamespace())
    side.register(config, SimpleNamespace(), {})  # type: ignore[arg-type]
    side.report()
    return side


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_without_a_draft_ends_its_saves_when_it_reports(
    stage: int, by_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM's first runner never calls ``wait_for_save`` there; on the last stage the draft has yet to run."""
    store = FakeStore(layers=("a", "b"))
    store.close = lambda *_: True  # type: ignore[attr-defined]
    side = registered(stage, monkeypatch, store)
    for number, page in ((7, 1), (8, 2)):
        step = StepMetadata(saves={0: blocks(page)}, witness=number)
        side.prepare(step)
        if by_layer:
            side.save_layer("a", step)
        report = side.report()
        if stage == 0:
            assert report is not None
            assert (report.done, report.broken) == ({number: 1}, "")
        assert (store.next_task.shards == [0, 1] if by_layer else ("dump", [page]) in store.calls) == (stage == 0)
        side.finish_saves(step)  # where the last stage's results are broadcast, vLLM calls it everywhere
        store.next_task.shards.clear()
    assert store.calls == [("begin" if by_layer else "dump", [page]) for page in (1, 2)]
    side.close()


@pytest.mark.parametrize("second_runner", [True, False])
def test_the_order_of_a_step_is_that_of_the_engine_s_model_runner(second_runner: bool) -> None:
    def order(clears: bool = False, **values: Any) -> StepOrder:
        known: dict[str, Any] = {"use_v2_model_runner": second_runner, "speculative_config": None}
        parallel = SimpleNamespace(use_ubatching=values.pop("use_ubatching", False))
        config: Any = SimpleNamespace(**{**known, **values}, parallel_config=parallel)
        return step_order(config, SimpleNamespace(needs_kv_cache_zeroing=clears))  # type: ignore[arg-type]

    plain = StepOrder(ends_whole_steps=second_runner)
    assert order() == plain
    assert order(clears=True) == replace(plain, clears_first=second_runner)
    assert order(use_ubatching=True) == replace(plain, microbatches=True)
    assert order(speculative_config=object()) == replace(plain, defers_saves=not second_runner)


@pytest.mark.parametrize("whole", [True, False])
def test_an_error_that_is_handled_at_the_end_of_a_step_is_a_failure_only_where_vllm_ends_failed_steps(
    whole: bool,
) -> None:
    """The second runner's last hook may run within a handler of its caller's, which says nothing about the forward."""
    store = FakeStore()
    side = worker(store, ends_whole_steps=whole)
    step = StepMetadata(saves={0: blocks(1)})
    side.prepare(step)
    side.save_layer("a", step)
    try:
        raise KeyError("of the caller")  # noqa: TRY301 - it is the handler that counts
    except KeyError:
        side.finish_saves(step)
    side.prepare(StepMetadata())
    report = side.report()
    assert ("broke off" in report.broken if report else False) == (not whole)


def test_an_engine_that_is_used_while_an_error_is_handled_saves() -> None:
    store = FakeStore(layers=("a", "b"))
    side = worker(store)
    try:
        int("the caller's own")
    except ValueError:
        step_of(side, blocks(1), ("a",))
    assert store.next_task.shards == [0, 1]


def test_closing_does_not_wait_for_layers_that_never_come() -> None:
    store = FakeStore(next_task=FakeTask(done=False))
    side = saves(store)
    side.submit_layer("a", {0: blocks(1)})
    side.close()
    assert (store.next_task.waits, store.next_task.shards) == (0, [0, 0])
    assert dropped(store)


@pytest.mark.parametrize("by_block", [True, False])
def test_loads_fail_at_once_until_the_copies_are_proven(by_block: bool) -> None:
    """A depot that came after the engine's start is not trusted before the self-test (P1); requests go on (P2)."""
    store = FakeStore()
    side = loads(store, by_block)
    side.refused = True
    side.start([Load(1, "r", before_forward=by_block, blocks={0: blocks(1, 2)})])
    side.wait_for_layer("a")
    side.finish_before_forward()
    assert store.calls == []
    assert side.finished() == (set() if by_block else {"r"})
    assert side.take_failed_pages() == ({1, 2} if by_block else set())
    assert side.take_failed_requests() == (set() if by_block else {"r"})
    report = side.take_report()
    assert report is not None
    assert report.failed == {1}


def test_a_rank_that_is_broken_says_so_without_a_load() -> None:
    side = loads(FakeStore())
    assert side.take_report() is None
    side.report_broken("why")
    report = side.take_report()
    assert report is not None
    assert report.broken == "why"
    assert side.take_report() is None


def test_closing_waits_for_loads_and_says_whether_all_have_ended() -> None:
    store = FakeStore()
    side = loads(store)
    side.start([Load(1, "r", before_forward=False, blocks={0: blocks(4)})])
    assert side.close()
    assert store.next_task.waits == 1


def test_closing_does_not_wait_for_ever_for_a_device_that_hangs() -> None:
    """P2; the caller must keep the memory that the device may still write to."""
    store = FakeStore(next_task=FakeTask(done=False))
    side = loads(store)
    side.start([Load(1, "r", before_forward=False, blocks={0: blocks(4)})])
    assert not side.close()
    assert store.next_task.waits == 1
