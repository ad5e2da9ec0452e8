"""Weights that change in place: what is known of them, who is asked, and what is served until then (P1)."""

from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import BLOCK, FakeDepot, FakeStore, Step, geometry, options, pages, request

from kvdepot.engines.vllm import compute
from kvdepot.engines.vllm.facts import canonical_of_version
from kvdepot.engines.vllm.meta import Blocks, Load, LoadReport, RankNamespaces, StepMetadata
from kvdepot.engines.vllm.scheduler import SchedulerSide
from kvdepot.engines.vllm.versions import WeightsVersion
from kvdepot.engines.vllm.worker import WorkerSide
from kvdepot.errors import UnavailableError

BASE = '{"facts": {"model": "m"}, "layout": [[1, [16]]]}'


def test_the_same_weights_keep_their_namespace_and_others_never_share_one() -> None:
    weights = WeightsVersion(2, fresh=lambda: "nobody else's")
    assert weights.begin({0: "a", 1: "b"}, named=True) == ""
    found = []
    for digests in ({0: "a", 1: "b"}, {0: "a", 1: "x"}, {0: "x", 1: "b"}, {0: "", 1: "b"}, {0: "a", 1: "b"}):
        weights.doubt(examine=True)
        assert weights.version is None
        assert weights.answered(weights.generation, digests)
        found.append(weights.version)
    assert found[0] == found[-1] == ""
    assert found[3] == "nobody else's"
    assert len(set(found)) == 4


def test_equal_weights_have_equal_versions_on_other_engines() -> None:
    versions = []
    for _ in range(2):
        weights = WeightsVersion(1)
        weights.begin({0: "a"}, named=True)
        weights.doubt(examine=True)
        weights.answered(1, {0: "updated"})
        versions.append(weights.version)
    assert versions[0] == versions[1] != ""


def test_weights_that_were_never_known_are_others_after_every_reset() -> None:
    weights = WeightsVersion(1)
    assert weights.begin({0: ""}, named=True) == ""
    seen = set()
    for generation in (1, 2):
        weights.doubt(examine=True)
        weights.answered(generation, {0: ""})
        seen.add(weights.version)
    assert len(seen) == 2
    assert "" not in seen


def test_an_answer_to_an_earlier_doubt_is_none() -> None:
    weights = WeightsVersion(1)
    weights.begin({0: "a"}, named=True)
    weights.doubt(examine=True)
    weights.doubt(examine=True)
    assert not weights.answered(1, {0: "a"})
    assert weights.version is None
    assert weights.answered(2, {0: "b"})


def test_weights_that_no_file_names_are_named_by_what_is_in_memory_or_refused() -> None:
    one, other, unknown = WeightsVersion(1), WeightsVersion(1), WeightsVersion(1)
    assert one.begin({0: "a"}, named=False) == other.begin({0: "b"}, named=False) == ""
    assert one.version
    assert one.version != other.version
    assert "weights_version" in unknown.begin({0: ""}, named=False)


def test_reports_of_ranks_are_one_answer() -> None:
    both = LoadReport(generation=1, weights={0: "a"}).aggregate(LoadReport(generation=1, weights={1: "b"}))
    assert (both.generation, both.weights) == (1, {0: "a", 1: "b"})
    assert both.aggregate(LoadReport(done={7: 1})).weights == both.weights
    assert both.aggregate(LoadReport(generation=2, weights={0: "c"})).weights == {0: "c"}


# The scheduler.


class Pool:
    """Blocks of vLLM's own cache: the null block is never free."""

    def __init__(self, used: int = 1) -> None:
        self.num_gpu_blocks, self.used = 100, used

    def get_num_free_blocks(self) -> int:
        return self.num_gpu_blocks - self.used


def engine(depot: Any, *digests: str, named: bool = True, **values: Any) -> SchedulerSide:
    side = SchedulerSide(depot, options(**values), geometry(), len(digests))
    side.kv_cache_manager = SimpleNamespace(block_pool=Pool())
    side.open_namespaces(
        [RankNamespaces({0: (BASE,)}, rank=rank, weights=digest, named=named) for rank, digest in enumerate(digests)]
    )
    return side


def namespaces(side: SchedulerSide) -> list[str]:
    return [namespace.id for group in side._namespaces.groups for namespace in group.stores]


def answer(side: SchedulerSide, *digests: str) -> StepMetadata:
    """Runs one step in which the workers are asked. Returns the next one's metadata."""
    side.match(request("waits", 4 * BLOCK), 0)
    asked = side.build_step(Step().output())
    assert asked.examine
    assert asked.version is None
    for rank, digest in enumerate(digests):
        side.reported(LoadReport(generation=asked.generation, weights={rank: digest}))
    return side.build_step(Step().output())


def test_a_reset_without_a_change_keeps_what_is_stored() -> None:
    depot = FakeDepot(units=9)
    side, req = engine(depot, "a", "b"), request("r", 4 * BLOCK)
    assert side.reset() is True
    assert depot.resets == []
    assert side.match(req, 0) == (None, False), "looked up before the weights are known"
    assert depot.claims == []
    after = answer(side, "a", "b")
    assert (after.version, after.examine) == ("", False)
    assert side.match(req, 0) == (3 * BLOCK, False)
    assert namespaces(side) == [BASE]


def test_after_a_change_nothing_is_served_from_the_earlier_namespace() -> None:
    depot = FakeDepot(units=9)
    side = engine(depot, "a", "b")
    side.reset()
    after = answer(side, "a", "changed")
    assert after.version
    assert namespaces(side) == [canonical_of_version(BASE, after.version)] != [BASE]
    side.reset()
    assert answer(side, "a", "b").version == "", "the weights of the start are back"
    assert namespaces(side) == [BASE]


def test_a_trainer_may_update_the_weights_any_number_of_times() -> None:
    """A process can use 2,048 namespaces at a time: the earlier versions' are closed."""
    depot = FakeDepot()
    side = engine(depot, "a")
    for update in range(100):
        side.reset()
        assert answer(side, f"update {update}").version
        assert depot.opened == set(namespaces(side))
    side.reset()
    answer(side, "update 99")
    assert depot.opened == set(namespaces(side)), "the same weights stay open"


def test_nothing_is_saved_until_the_weights_are_known_and_pages_are_fenced_all_the_same() -> None:
    side, req = engine(FakeDepot(), "a"), request("r", 2 * BLOCK)
    side.match(req, 0)
    side.reset()
    side.allocated(req, SimpleNamespace(get_block_ids=lambda: ([1, 2],)), 0)
    step = side.build_step(Step().starts("r", 0, 2 * BLOCK, [1, 2]).output())
    assert step.saves == {}
    assert step.fresh_pages == [1, 2], "a dump of an earlier step may still read these"


def test_a_request_waits_for_the_workers_word_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("kvdepot.engines.vllm.scheduler.time.monotonic", lambda: now[0])
    side, req = engine(FakeDepot(units=9), "a"), request("r", 4 * BLOCK)
    side.reset()
    assert side.match(req, 0) == (None, False)
    now[0] += 1000
    assert side.match(req, 0) == (0, False)


def test_a_change_under_running_requests_turns_the_cache_off_until_a_whole_reset() -> None:
    """vLLM keeps its own cache while a request has blocks: results computed on it mix both weights."""
    side, req = engine(FakeDepot(units=9), "a"), request("r", 4 * BLOCK)
    side.kv_cache_manager.block_pool.used = 5
    for _ in range(2):  # the second finds nothing new, and vLLM's cache is as stale as before
        side.reset()
        assert answer(side, "changed").version is None
        assert side.match(req, 0) == (0, False)
    side.kv_cache_manager.block_pool.used = 1
    side.reset()
    assert answer(side, "changed").version
    assert side.match(req, 0) == (3 * BLOCK, False)


def test_a_reset_with_nothing_to_reset_is_done() -> None:
    depot = FakeDepot()
    side = SchedulerSide(depot, options(), geometry(), 1)  # type: ignore[arg-type]
    assert side.reset() is True
    side.open_namespaces([RankNamespaces(broken="a kind of cache that is not stored by block")])
    assert side.reset() is True
    assert not side.build_step(Step().output()).examine


class DeadDepot(FakeDepot):
    dead = True

    def reset(self, namespaces: Any) -> None:
        if self.dead:
            raise UnavailableError("no depot")
        super().reset(namespaces)


def test_a_drop_that_no_depot_confirms_is_made_up_for_before_the_next_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("kvdepot.engines.vllm.scheduler.time.monotonic", lambda: now[0])
    depot = DeadDepot(units=9)
    side, req = engine(depot, "a", drop_at_reset=True), request("r", 4 * BLOCK)
    assert side.reset() is True
    answer(side, "a")
    now[0] += 10
    assert side.match(req, 0) == (0, False)
    assert depot.claims == []
    depot.dead = False
    now[0] += 10
    assert side.match(req, 0) == (3 * BLOCK, False)
    assert [[one.id for one in names] for names in depot.resets] == [[BASE]]


def test_weights_without_a_name_begin_in_a_namespace_of_their_own() -> None:
    side = engine(FakeDepot(), "a", named=False)
    version = side.build_step(Step().output()).version
    assert version
    assert namespaces(side) == [canonical_of_version(BASE, version)]
    refused = engine(FakeDepot(), "", named=False)
    assert namespaces(refused) == []


# The worker.


class MovingStore(FakeStore):
    """Records the versions it was opened for."""

    def __init__(self, log: list[str], **values: Any) -> None:
        super().__init__(**values)
        self.log = log
        self.closed = False
        self.copies_go_on = False
        self.set_decoding = self._only_while_open

    def of_version(self, depot: Any, version: str, options: Any, owner: object) -> "MovingStore":
        self.log.append(f"version {version}, dumps ended: {self.next_task.done()}")
        self.closed = False
        return self

    def _only_while_open(self, decoding: bool) -> None:
        assert not self.closed, "as the core's store says"

    def close(self, wait_ms: int = 0) -> bool:
        self.closed = True
        self.log.append(f"closed, dumps ended: {self.next_task.done()}")
        return not self.copies_go_on


class Weights:
    """Weights in a rank's memory."""

    now = "what is there"

    def digest(self) -> str:
        return self.now

    def sample(self) -> str:
        return self.now[:4]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerSide, MovingStore]:
    monkeypatch.setattr(compute, "_cuda", lambda: None)
    side = WorkerSide(SimpleNamespace(), options(), geometry())  # type: ignore[arg-type]
    store = MovingStore([])
    side._stores[0] = store  # type: ignore[assignment]
    side._names.rank = 3
    side._weights = Weights()  # type: ignore[assignment]
    side._sampled = side._weights.sample()
    return side, store


def dump_late(side: WorkerSide, store: MovingStore) -> None:
    step = StepMetadata(saves={0: Blocks([b"x"], [1])})
    store.next_task.is_done = False
    side.prepare(step)
    side.finish_saves(step)


def test_a_worker_answers_each_doubt_once(rank: Any) -> None:
    side, _ = rank
    for generation in (1, 1, 2):
        side.prepare(StepMetadata(generation=generation, version=None, examine=True))
    report = side.report()
    assert report is not None
    assert (report.generation, report.weights) == (2, {3: "what is there"})
    assert side.report() is None


def test_a_worker_moves_when_its_copies_have_ended(rank: Any) -> None:
    side, store = rank
    dump_late(side, store)
    for version in ("", "v1", "v1", ""):
        side.prepare(StepMetadata(generation=1, version=version))
    assert store.log == ["version v1, dumps ended: True", "version , dumps ended: True"]


def test_a_worker_that_cannot_follow_turns_all_off(rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    side, store = rank

    def refuse(*_: Any) -> None:
        raise UnavailableError("no room for a namespace")

    monkeypatch.setattr(store, "of_version", refuse)
    step = StepMetadata(generation=1, version="v1", loads=[Load(1, "r", True, {0: Blocks([b"x"], [1])})])
    side.prepare(step)
    side.start_loads(step)
    side.finish_saves(step)
    assert store.calls == []
    report = side.report()
    assert report is not None
    assert "no room" in report.broken
    assert report.failed == {1}


def test_pages_are_left_alone_while_the_engine_sleeps(rank: Any) -> None:
    """Their memory is gone: nothing may read or write it, or stay registered (P3)."""
    side, store = rank
    dump_late(side, store)
    side.sleep()
    assert store.log == ["closed, dumps ended: True"]
    step = StepMetadata(loads=[Load(1, "r", True, {0: Blocks([b"x"], [1])})], saves={0: Blocks([b"y"], [2])})
    before = len(store.calls)
    side.prepare(step)
    side.start_loads(step)
    side.finish_saves(step)
    assert len(store.calls) == before
    report = side.report()
    assert report is not None
    assert report.failed == {1}
    side.wake_up()
    assert store.log[1:] == ["version , dumps ended: True"]
    side.prepare(StepMetadata())
    side.start_loads(step)
    assert len(store.calls) == before + 1


def test_a_copy_that_does_not_end_before_a_sleep_turns_the_connector_off(rank: Any) -> None:
    side, store = rank
    side.report()
    store.copies_go_on = True
    side.sleep()
    report = side.report()
    assert report is not None
    assert "a copy has not completed" in report.broken


def test_weights_that_changed_without_a_word_are_found_after_a_pause(
    rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads would be of other weights, and results build on vLLM's own KV of other weights (P1)."""
    now = [100.0]
    monkeypatch.setattr("kvdepot.engines.vllm.worker.time.monotonic", lambda: now[0])
    side, store = rank
    step = StepMetadata(loads=[Load(1, "r", True, {0: Blocks([b"x"], [1])})], saves={0: Blocks([b"y"], [2])})

    def run(step: StepMetadata) -> LoadReport | None:
        side.prepare(step)
        side.start_loads(step)
        side.finish_saves(step)
        return side.report()  # type: ignore[no-any-return]

    report = run(step)
    assert report is not None
    assert report.moved is None
    assert len(store.calls) == 2
    side._weights.now = "others"
    now[0] += 1
    report = run(step)
    assert report is not None
    assert (report.moved, report.failed) == (0, {1})
    assert len(store.calls) == 2, "used although the weights are others"
    assert run(StepMetadata(generation=1, version=None)) is None
    report = run(StepMetadata(generation=2, version=None, examine=True))
    assert report is not None
    assert report.weights == {3: "others"}
    step.generation, step.version = 2, "v"
    report = run(step)
    assert report is not None
    assert report.moved is None
    assert len(store.calls) == 4


def test_a_change_without_a_word_ends_all_use_until_a_whole_reset() -> None:
    depot = FakeDepot(units=9)
    side, req = engine(depot, "a", "b"), request("r", 4 * BLOCK)
    assert side.match(req, 0)[0]
    side.reported(LoadReport(moved=0).aggregate(LoadReport()))
    assert depot.claims[0].released
    assert side.match(req, 0) == (0, False)
    step = side.build_step(Step().output())
    assert (step.version, step.examine) == (None, False)
    side.reset()
    version = answer(side, "a", "changed").version
    assert version
    side.reported(LoadReport(moved=0))
    assert namespaces(side) == [canonical_of_version(BASE, version)], "a late word of an earlier generation"


def test_a_change_before_the_first_request_is_examined_like_one_with_a_reset() -> None:
    depot = FakeDepot(units=9)
    side, req = engine(depot, "a", "b"), request("r", 4 * BLOCK)
    unused = LoadReport(moved=0, moved_unused=True)
    side.reported(unused.aggregate(unused).aggregate(LoadReport()))
    assert side.match(req, 0) == (None, False), "it waits for the answer"
    version = answer(side, "a", "changed").version
    assert version
    assert namespaces(side) == [canonical_of_version(BASE, version)]
    assert side.match(req, 0)[0]


def test_a_change_that_one_rank_noticed_after_it_computed_is_not_examined() -> None:
    side = engine(FakeDepot(units=9), "a", "b")
    side.reported(LoadReport(moved=0, moved_unused=True).aggregate(LoadReport(moved=0)))
    assert not side.build_step(Step().output()).examine


def first_step_after_a_reset(depot: FakeDepot, drops: bool = False) -> tuple[SchedulerSide, Any]:
    """A reset that comes before any rank has reported its namespaces, and the report of the first step."""
    side = SchedulerSide(depot, options(drop_at_reset=drops), geometry(), 1)  # type: ignore[arg-type]
    assert side.reset()
    req = request("r", 4 * BLOCK)
    assert side.match(req, 0) == (None, False)
    asked = side.build_step(Step().output())
    assert asked.examine
    report = LoadReport(ranks=[RankNamespaces({0: ('{"facts": {}}',)}, weights="start")])
    report.generation, report.weights = asked.generation, {0: "updated"}
    side.reported(report)
    return side, req


@pytest.mark.parametrize("drops", [False, True])
def test_a_reset_before_the_first_step_is_answered_together_with_the_namespaces(drops: bool) -> None:
    """A trainer that updates the weights before it sends the first request."""
    depot = FakeDepot(units=9)
    side, req = first_step_after_a_reset(depot, drops)
    assert side.build_step(Step().output()).version not in (None, "")
    (group,) = side._namespaces.groups
    opened: Any = group.stores
    assert "weights_version" in opened[0].id
    assert side.match(req, 0)[0]
    assert [[one.id for one in reset] for reset in depot.resets] == ([[opened[0].id]] if drops else [])


def test_a_drop_before_the_first_step_that_no_depot_confirms_keeps_everything_closed() -> None:
    depot = FakeDepot(units=9)

    def refuse(_namespaces: Any) -> None:
        raise UnavailableError("no depot")

    depot.reset = refuse  # type: ignore[method-assign]
    side, req = first_step_after_a_reset(depot, drops=True)
    assert side.match(req, 0) == (0, False)
    assert depot.claims == []


def test_a_step_that_only_ends_requests_does_not_ask_for_the_weights() -> None:
    """A trainer that has paused the engine has not replaced them yet."""
    side = engine(FakeDepot(units=9), "a")
    side.reset()
    assert not side.build_step(Step().output()).examine
    side.match(request("r", 4 * BLOCK), 0)
    assert side.build_step(Step().output()).examine


def test_a_namespace_that_cannot_be_opened_turns_the_connector_off() -> None:
    depot = FakeDepot(units=9)
    side = engine(depot, "a")
    side.reset()

    def refuse(_canonical: str) -> Any:
        raise UnavailableError("no more namespaces")

    depot.open_namespace = refuse  # type: ignore[method-assign]
    answer(side, "changed")
    assert side.match(request("r", 4 * BLOCK), 0) == (0, False)


def test_what_a_request_saved_before_a_reset_is_saved_again_after_it() -> None:
    """Its namespace may be another one, and it starts while there is none."""
    side, req = engine(FakeDepot(), "a"), request("r", 4 * BLOCK)
    side.match(req, 0)
    side.allocated(req, pages([1, 2, 3, 4]), 0)
    table = ([1, 2, 3, 4],)
    assert side.build_step(Step().starts("r", 0, 2 * BLOCK, [1, 2, 3, 4]).output()).saves[0].pages == [1, 2]
    side.reset()
    asked = side.build_step(Step(resumed={"r"}).goes_on("r", 0, 2 * BLOCK, table, fresh=table).output())
    side.reported(LoadReport(generation=asked.generation, weights={0: "a"}))
    later = side.build_step(Step().goes_on("r", 2 * BLOCK, 2 * BLOCK, table).output())
    assert later.saves[0].pages == [1, 2, 3, 4]
