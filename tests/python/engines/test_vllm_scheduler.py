"""The scheduler's side of the vLLM connector: hits, loads, and saves that wait for proof."""

from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import BLOCK, FakeClaim, FakeDepot, Step, found, geometry, options, pages, request, scheduler

from kvdepot.claim import ClaimTimes, TierReads
from kvdepot.engines.vllm.lookup import CLAIM_WAIT_MS
from kvdepot.engines.vllm.meta import LoadReport, RankNamespaces
from kvdepot.engines.vllm.namespaces import RANK_STEPS_MAX
from kvdepot.engines.vllm.scheduler import SchedulerSide
from kvdepot.engines.vllm.step_order import StepOrder


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's time stands still: however slow the machine is, no miss gets old, and no wait ends."""
    monkeypatch.setattr("kvdepot.engines.vllm.scheduler.time", SimpleNamespace(monotonic=lambda: 100.0))


def admit(side: Any, req: Any, local: int, *table: list[int]) -> int:
    """Matches and allocates as vLLM does. Returns the external tokens."""
    tokens, _ = side.match(req, local)
    side.allocated(req, pages(*table), tokens)
    return tokens


def test_hits_leave_a_token_to_compute_only_where_the_step_waits_for_them() -> None:
    req = request("r", 4 * BLOCK)
    assert scheduler(FakeDepot(units=9)).match(req, 0) == (3 * BLOCK, False)
    assert scheduler(FakeDepot(units=9), use_layerwise=False).match(req, 0) == (4 * BLOCK, True)


def test_models_with_windows_load_between_steps_and_leave_a_token() -> None:
    """After an async load of everything vLLM takes a token back, and a window would begin where nothing was loaded."""
    assert scheduler(FakeDepot(units=9), windows=(0, 2)).match(request("r", 4 * BLOCK), 0) == (3 * BLOCK, True)


def starting(depot: FakeDepot, ranks: int = 1) -> SchedulerSide:
    """The scheduler's side before any rank has reported."""
    return SchedulerSide(depot, options(), geometry(), ranks)  # type: ignore[arg-type]


def test_first_requests_wait_until_every_rank_has_named_its_pages() -> None:
    depot = FakeDepot(units=9)
    side, req = starting(depot, ranks=2), request("r", 4 * BLOCK)
    assert side.match(req, 0) == (None, False)
    side.build_step(Step().output())
    side.reported(LoadReport(ranks=[found(0)]))
    assert side.match(req, 0) == (None, False)
    side.reported(LoadReport(ranks=[found(1)]))
    assert side.match(req, 0) == (3 * BLOCK, False)


def test_ranks_that_never_name_their_pages_cost_requests_a_bounded_number_of_steps() -> None:
    depot = FakeDepot(units=9)
    side, req = starting(depot), request("r", 4 * BLOCK)
    for _ in range(RANK_STEPS_MAX):
        assert side.match(req, 0) == (None, False)
        assert side.build_step(Step().output()).saves == {}
    assert side.match(req, 0) == (0, False)
    assert depot.claims == []


def test_a_rank_that_cannot_take_part_turns_the_connector_off_before_the_first_lookup() -> None:
    depot = FakeDepot(units=9)
    side = starting(depot, ranks=2)
    broken = RankNamespaces(broken="the bytes read back differ from those written")
    side.reported(LoadReport(ranks=[found(0)]).aggregate(LoadReport(ranks=[broken])))
    assert side.match(request("r", 4 * BLOCK), 0) == (0, False)
    assert depot.claims == []


@pytest.mark.parametrize(("loads", "dumps"), [(True, True), (True, False), (False, True)])
def test_kv_role_says_whether_an_engine_loads_and_dumps(loads: bool, dumps: bool) -> None:
    side, req = scheduler(FakeDepot(units=1), loads=loads, dumps=dumps), request("r", 4 * BLOCK)
    assert (admit(side, req, 0, [1, 2, 3, 4]) > 0) == loads
    side.build_step(Step().starts("r", 0, 4 * BLOCK, [1, 2, 3, 4]).output())
    side.reported(LoadReport({1: 1}))
    step = side.build_step(Step().goes_on("r", 4 * BLOCK, BLOCK, ([1, 2, 3, 4, 5],)).output())
    side.build_step(Step().output())
    assert bool(side._requests["r"].saved_blocks) == dumps
    assert bool(step.late_saves) == (loads and dumps)


def test_a_request_that_was_never_announced_is_no_error() -> None:
    scheduler(FakeDepot()).allocated(request("r", BLOCK), pages([1]), 0)


def test_a_request_that_waits_for_admission_keeps_one_claim() -> None:
    depot = FakeDepot(units=9)
    side, req = scheduler(depot), request("r", 4 * BLOCK)
    assert [side.match(req, 0) for _ in range(3)] == [(3 * BLOCK, False)] * 3
    assert len(depot.claims) == 1
    # The claim also covers what begins after a longer hit of vLLM's own, and nothing of what begins before its own.
    assert side.match(req, BLOCK) == (2 * BLOCK, False)
    assert [claim.released for claim in depot.claims] == [False]
    assert side.match(req, 0) == (3 * BLOCK, False)
    assert [claim.released for claim in depot.claims] == [True, False]
    side.finished("r")
    assert depot.claims[1].released


def test_a_load_begins_after_the_local_hit_that_the_request_is_admitted_with() -> None:
    side, req = scheduler(FakeDepot(units=9)), request("r", 4 * BLOCK)
    assert side.match(req, 0) == (3 * BLOCK, False)
    assert admit(side, req, BLOCK, [1, 2, 3, 4]) == 2 * BLOCK
    (load,) = side.build_step(Step().starts("r", 3 * BLOCK, BLOCK, [1, 2, 3, 4]).output()).loads
    assert load.blocks[0].pages == [2, 3]
    assert load.blocks[0].hashes == [b"r/1", b"r/2"]


def test_a_local_hit_that_reaches_the_end_of_a_claim_drops_it() -> None:
    depot = FakeDepot(units=9, settled=False)
    side, req = scheduler(depot, wait_ms=10**9), request("r", 4 * BLOCK)
    assert side.match(req, 0) == (None, False)
    assert admit(side, req, 3 * BLOCK, [1, 2, 3, 4]) == 0
    assert [claim.released for claim in depot.claims] == [True]
    assert side.stats.data["misses"] == {"own_cache": 1}


def test_a_local_hit_beyond_a_settled_one_is_claimed_anew() -> None:
    """A tier may have blocks beyond a hit that was cut."""
    depot = FakeDepot(units=2)
    side, req = scheduler(depot), request("r", 6 * BLOCK)
    assert side.match(req, 0)[0] == 2 * BLOCK
    side.match(req, 3 * BLOCK)
    first, second = depot.claims
    assert first.released
    assert second.skip == 3


def test_windows_are_claimed_anew_for_another_local_hit() -> None:
    """A hit that begins elsewhere needs other blocks of a window."""
    depot = FakeDepot(units=9)
    side, req = scheduler(depot, windows=(0, 2)), request("r", 8 * BLOCK)
    side.match(req, 0)
    side.match(req, BLOCK)
    assert [(claim.skip, claim.released) for claim in depot.claims] == [(0, True), (1, False)]


def test_a_miss_is_not_asked_again_at_every_step() -> None:
    depot = FakeDepot(units=0)
    side, req = scheduler(depot), request("r", 4 * BLOCK)
    assert [side.match(req, 0) for _ in range(5)] == [(0, False)] * 5
    assert len(depot.claims) == 1
    assert depot.claims[0].released


@pytest.mark.parametrize(("wait_ms", "first"), [(1000, (None, False)), (0, (3 * BLOCK, False))])
def test_the_policy_says_how_long_a_tier_is_waited_for(wait_ms: int, first: Any) -> None:
    depot = FakeDepot(units=9, settled=False)
    side, req = scheduler(depot, wait_ms=wait_ms), request("r", 4 * BLOCK)
    assert side.match(req, 0) == first
    depot.claims[0].settled = True
    assert side.match(req, 0) == (3 * BLOCK, False)


def test_only_an_idle_engine_gives_a_waiting_claim_time() -> None:
    """Scheduling nothing repeatedly would take a processor from the fetches; running requests are not delayed."""
    depot = FakeDepot(units=9, settled=False)
    side, req = scheduler(depot, wait_ms=10**6), request("r", 4 * BLOCK)
    side.build_step(Step().starts("other", 0, BLOCK, [9]).output())
    assert side.match(req, 0) == (None, False)
    assert (depot.claims[0].polls, depot.claims[0].waits) == (1, [])
    side.build_step(Step().output())
    assert side.match(req, 0) == (None, False)
    assert depot.claims[0].waits == [CLAIM_WAIT_MS]


def test_a_step_waits_once_however_many_requests_wait() -> None:
    depot = FakeDepot(units=9, settled=False)
    side = scheduler(depot, wait_ms=10**6)
    waiting = [request(f"r{index}", 4 * BLOCK) for index in range(100)]
    for _ in range(2):
        side.build_step(Step().output())
        for req in waiting:
            assert side.match(req, 0) == (None, False)
    assert sum(len(claim.waits) for claim in depot.claims) == 2


def nearly_there(left: int, idle: bool = True, **values: Any) -> tuple[FakeDepot, tuple[int | None, bool]]:
    """Returns the answer for a claim that began a second ago, of whose 1000 blocks ``left`` have not arrived."""
    depot = FakeDepot(units=9, settled=False)
    side, req = scheduler(depot, **{"wait_ms": 10**6, **values}), request("r", 4 * BLOCK)
    assert side.match(req, 0)[0] is None
    side.build_step((Step() if idle else Step().starts("other", 0, BLOCK, [9])).output())
    side._requests["r"].lookup.started_s -= 1.0  # type: ignore[union-attr]
    depot.claims[0].on_their_way = (3, 0, 3, 1000 - left, left)
    return depot, side.match(req, 0)


def test_an_idle_engine_begins_a_load_when_its_last_blocks_are_about_to_come() -> None:
    """Copying arrived blocks takes as long as the others need; a thousandth of a second's work takes a millisecond."""
    depot, answer = nearly_there(left=1)
    assert answer == (3 * BLOCK, False)
    assert not depot.claims[0].released
    assert nearly_there(left=100)[1] == (None, False)
    assert nearly_there(left=1000)[1] == (None, False)


def test_nobody_else_waits_for_blocks_that_have_not_come() -> None:
    """A step that others compute in, one between which loads run anyway, and a policy with a deadline."""
    assert nearly_there(left=1, idle=False)[1] == (None, False)
    assert nearly_there(left=1, use_layerwise=False)[1] == (None, False)
    assert nearly_there(left=1, waits_for_all=False)[1] == (None, False)


def test_a_hit_that_is_arriving_becomes_a_load_that_keeps_its_claim() -> None:
    depot = FakeDepot(units=9, settled=False)
    side, req = scheduler(depot, wait_ms=10**6), request("r", 4 * BLOCK)
    side.match(req, 0)
    side.build_step(Step().output())
    side._requests["r"].lookup.started_s -= 1.0  # type: ignore[union-attr]
    depot.claims[0].on_their_way = (3, 2, 2, 999, 1)
    assert admit(side, req, 0, [7, 8, 9, 10]) == 3 * BLOCK
    assert side.hit_tier_tokens(req) == 2 * BLOCK
    (load,) = side.build_step(Step().output()).loads
    assert (load.before_forward, load.blocks[0].pages) == (True, [7, 8, 9])
    assert not depot.claims[0].released
    side.reported(LoadReport({load.load_id: 1}))
    assert depot.claims[0].released


def test_a_step_says_whether_somebody_decodes() -> None:
    """Then copies leave a device's multiprocessors alone."""
    side = scheduler(FakeDepot())
    req = request("r", 3 * BLOCK)
    side.new_request(req)
    assert not side.build_step(Step().starts("r", 0, BLOCK, [1]).output()).decoding
    assert not side.build_step(Step().goes_on("r", BLOCK, 2 * BLOCK, ([1, 2, 3],)).output()).decoding
    assert side.build_step(Step().goes_on("r", 3 * BLOCK, 1, ([1, 2, 3, 4],)).output()).decoding


def test_limits_of_the_configuration() -> None:
    req = request("r", 8 * BLOCK)
    assert scheduler(FakeDepot(units=9), hit_ratio=0.5).match(req, 0) == (4 * BLOCK, False)
    assert scheduler(FakeDepot(units=9), hit_ratio=0.5).match(req, 4 * BLOCK) == (0, False)
    assert scheduler(FakeDepot(units=9), persist_token_threshold=8 * BLOCK + 1).match(req, 0) == (0, False)
    req.skip_reading_prefix_cache = True
    assert scheduler(FakeDepot(units=9)).match(req, 0) == (0, False)


def test_a_hit_becomes_a_load_without_null_blocks_and_keeps_its_leases_until_all_ranks_have_it() -> None:
    depot = FakeDepot(units=9)
    side, req = scheduler(depot, ranks=2, windows=(0, 2)), request("r", 5 * BLOCK)
    assert admit(side, req, BLOCK, [7, 1, 2, 3, 4], [0, 0, 5, 6, 8]) == 3 * BLOCK
    step = side.build_step(Step().output())
    (load,) = step.loads
    assert not load.before_forward
    assert load.blocks[0].pages == [1, 2, 3]
    assert load.blocks[0].hashes == [b"r/1", b"r/2", b"r/3"]
    assert load.blocks[1].pages == [5, 6]
    assert set(step.fresh_pages) == {1, 2, 3, 4, 5, 6, 8}
    side.reported(LoadReport({load.load_id: 1}))
    assert not depot.claims[0].released
    side.finished("r")  # aborted: a rank may still copy
    assert not depot.claims[0].released
    side.reported(LoadReport({load.load_id: 1}))
    assert depot.claims[0].released


def test_an_offer_that_the_scheduler_does_not_take_is_dropped() -> None:
    depot = FakeDepot(units=9)
    side, req = scheduler(depot), request("r", 4 * BLOCK)
    side.match(req, 0)
    side.allocated(req, pages([1, 2, 3, 4]), 0)
    assert depot.claims[0].released
    assert side.build_step(Step().output()).loads == []


def test_blocks_are_saved_once_when_their_last_token_is_computed() -> None:
    side, req = scheduler(FakeDepot()), request("r", 2 * BLOCK + 8, known=3 * BLOCK)
    admit(side, req, 0, [1, 2, 3])
    first = side.build_step(Step().starts("r", 0, BLOCK + 4, [1, 2, 3]).output())
    assert (first.saves[0].hashes, first.saves[0].pages) == ([b"r/0"], [1])
    table = ([1, 2, 3],)
    second = side.build_step(Step().goes_on("r", BLOCK + 4, BLOCK + 4, table).output())
    assert second.saves[0].pages == [2]
    decode = side.build_step(Step().goes_on("r", 3 * BLOCK - 1, 1, table).output())
    assert decode.saves[0].pages == [3]


def beside_another(ranks: int = 1) -> tuple[SchedulerSide, Any]:
    """A step whose request has two of its four blocks from another connector, and computes the others."""
    side, req = scheduler(FakeDepot(), ranks=ranks), request("r", 4 * BLOCK)
    assert admit(side, req, 0, [1, 2, 3, 4]) == 0
    step = side.build_step(Step().starts("r", 2 * BLOCK, 2 * BLOCK, [1, 2, 3, 4]).output())
    assert step.saves == {}
    assert step.witness
    return side, step


def test_what_another_connector_loaded_is_saved_when_every_rank_has_computed_on_it() -> None:
    side, step = beside_another(ranks=2)
    side.reported(LoadReport({step.witness: 1}))
    assert side.build_step(Step().output()).late_saves == {}
    side.reported(LoadReport({step.witness: 1}))
    assert side.build_step(Step().output()).late_saves[0].pages == [1, 2, 3, 4]
    assert not side.has_late_saves()


def test_pages_that_another_connector_may_load_into_are_fenced_before_a_step_computes_on_them() -> None:
    """Its load may write to them while a dump for another request still reads them (P3)."""
    side, req = scheduler(FakeDepot()), request("r", 4 * BLOCK)
    side.match(req, BLOCK)
    side.allocated(req, pages([1, 2, 3, 4]), 0)
    assert side.build_step(Step().output()).fresh_pages == [2, 3, 4]


def test_nothing_is_saved_of_a_step_in_which_another_connector_failed() -> None:
    side, step = beside_another()
    side.reported(LoadReport({step.witness: 1}), invalid_pages=True)
    assert not side.has_late_saves()
    again = side.build_step(Step().goes_on("r", BLOCK, 3 * BLOCK, ([1, 2, 3, 4],)).output())
    assert again.late_saves == {}
    assert again.saves[0].pages == [1, 2, 3, 4]


def test_requests_of_a_step_planned_before_a_failure_was_known_are_not_saved_any_more() -> None:
    """VLLM considers their results valid. Blocks that others compute on their pages are not stored either (P1)."""
    side, step = beside_another()
    side.kv_cache_manager = FakeManager({"r": ([1, 2, 3, 4, 5],)})
    after = side.build_step(Step().goes_on("r", 4 * BLOCK, BLOCK, ([1, 2, 3, 4, 5],)).output())
    assert after.saves == {}
    side.reported(LoadReport({step.witness: 1}), invalid_pages=True)
    assert side.kv_cache_manager.evicted == {1, 2, 3, 4, 5}
    side.new_request(request("sharer", 4 * BLOCK))
    later = Step().goes_on("r", BLOCK, 3 * BLOCK, ([1, 2, 3, 4],)).starts("sharer", BLOCK, BLOCK, [1, 9])
    assert side.build_step(later.output()).saves == {}
    assert side.kv_cache_manager.evicted == {1, 2, 3, 4, 5, 9}
    for name in ("r", "sharer"):
        side.finished(name)
    side.new_request(request("other", BLOCK))
    assert side.build_step(Step().starts("other", 0, BLOCK, [1]).output()).saves[0].pages == [1]


def test_readers_of_a_load_that_failed_while_a_step_was_under_way_are_not_saved_any_more() -> None:
    side, load_id = loading(ranks=1)
    side.kv_cache_manager = FakeManager({"r": ([1, 2, 3, 4],), "sharer": ([9, 1, 2, 11],)})
    side.new_request(request("sharer", 4 * BLOCK))
    side.build_step(Step().starts("sharer", 2 * BLOCK, BLOCK, [9, 1, 2, 11]).output())
    side.reported(LoadReport({load_id: 1}, {load_id}))
    later = Step().goes_on("sharer", 3 * BLOCK, BLOCK, ([9, 1, 2, 11],))
    assert side.build_step(later.output()).saves == {}


def test_requests_that_share_pages_of_a_failed_load_are_not_saved_any_more() -> None:
    """Of the same step: vLLM lets them go on, and only a later step of the first request repairs the pages (P1)."""
    side, req = scheduler(FakeDepot(units=2)), request("r", 4 * BLOCK)
    side.kv_cache_manager = FakeManager({"r": ([1, 2, 3, 4],), "sharer": ([1, 2, 11, 12],)})
    admit(side, req, 0, [1, 2, 3, 4])
    assert admit(side, request("sharer", 4 * BLOCK), 2 * BLOCK, [1, 2, 11]) == 0
    step = Step().starts("r", 2 * BLOCK, 2 * BLOCK, [1, 2, 3, 4]).starts("sharer", 2 * BLOCK, BLOCK, [1, 2, 11])
    (load,) = side.build_step(step.output()).loads
    side.reported(LoadReport({load.load_id: 1}, {load.load_id}))
    alone = Step().goes_on("sharer", 3 * BLOCK, BLOCK, ([1, 2, 11, 12],))
    assert side.build_step(alone.output()).saves == {}
    again = Step().goes_on("r", 0, 4 * BLOCK, ([1, 2, 3, 4],))
    assert side.build_step(again.output()).saves[0].pages == [1, 2, 3, 4]


def test_requests_that_share_pages_of_another_connectors_failed_load_are_not_saved_any_more() -> None:
    side = scheduler(FakeDepot())
    tables = {"r": [1, 2, 3, 4], "sharer": [1, 2, 11, 12], "second": [1, 2, 11, 13], "apart": [21, 22, 23, 24]}
    side.kv_cache_manager = FakeManager({name: (table,) for name, table in tables.items()})
    step = Step()
    for name, table in tables.items():
        local = {"r": 0, "sharer": 2, "second": 3, "apart": 0}[name] * BLOCK
        admit(side, request(name, 4 * BLOCK), local, table)
        step.starts(name, max(local, 2 * BLOCK), 2 * BLOCK if name == "r" else BLOCK, table)
    made = side.build_step(step.output())
    side.reported(LoadReport({made.witness: 1}), invalid_pages=True)
    later = Step()
    for name, table in tables.items():
        later.goes_on(name, 0, 4 * BLOCK, (table,))
    assert side.build_step(later.output()).saves[0].pages == [1, 2, 3, 4, 21, 22, 23, 24]


def test_a_session_of_streaming_input_saves_only_what_its_next_input_adds() -> None:
    """vLLM starts each input as a request that has computed tokens, and asks for no hit: its KV was computed here."""
    side, session = scheduler(FakeDepot()), request("s", 3 * BLOCK)
    admit(side, session, 0, [1, 2])
    assert side.build_step(Step().starts("s", 0, 2 * BLOCK, [1, 2]).output()).saves[0].pages == [1, 2]
    side.allocated(session, pages([1, 2, 3]), 0)
    step = side.build_step(Step().starts("s", 2 * BLOCK, BLOCK, [1, 2, 3]).output())
    assert (step.saves[0].pages, step.witness, step.fresh_pages) == ([3], 0, [3])


def test_a_session_whose_last_tokens_were_discarded_saves_their_block_again() -> None:
    side, session = scheduler(FakeDepot()), request("s", 2 * BLOCK)
    admit(side, session, 0, [1, 2])
    side.build_step(Step().starts("s", 0, 2 * BLOCK, [1, 2]).output())
    session.block_hashes[1:] = [b"s/another"]
    step = side.build_step(Step().starts("s", 2 * BLOCK - 1, 1, [1, 2]).output())
    assert (step.saves[0].hashes, step.saves[0].pages, step.fresh_pages) == ([b"s/another"], [2], [2])


def test_a_session_that_was_matched_again_may_start_on_what_another_connector_loaded() -> None:
    side, session = scheduler(FakeDepot()), request("s", 3 * BLOCK)
    admit(side, session, 0, [1, 2])
    side.build_step(Step().starts("s", 0, 2 * BLOCK, [1, 2]).output())
    admit(side, session, 0, [4, 5, 6])  # after a preemption
    step = side.build_step(Step().starts("s", 2 * BLOCK, BLOCK, [4, 5, 6]).output())
    assert step.witness
    assert step.fresh_pages == [4, 5, 6]


def test_tokens_without_a_hash_are_not_saved() -> None:
    """A draft that may be rejected has no hash yet, whatever was scheduled."""
    side, req = scheduler(FakeDepot()), request("r", BLOCK, known=BLOCK)
    admit(side, req, 0, [1, 2])
    step = side.build_step(Step().starts("r", 0, 2 * BLOCK, [1, 2]).output())
    assert step.saves[0].pages == [1]


def test_blocks_that_left_the_window_are_not_saved() -> None:
    side, req = scheduler(FakeDepot(), windows=(0, 1)), request("r", 3 * BLOCK)
    admit(side, req, 0, [1, 2, 3], [4, 5, 6])
    step = side.build_step(Step().starts("r", 0, 3 * BLOCK, [1, 2, 3], [0, 5, 6]).output())
    assert step.saves[0].pages == [1, 2, 3]
    assert step.saves[1].pages == [5, 6]


def test_hit_blocks_are_not_saved_again() -> None:
    side, req = scheduler(FakeDepot(units=2)), request("r", 4 * BLOCK)
    assert admit(side, req, BLOCK, [1, 2, 3, 4]) == BLOCK
    side.build_step(Step().starts("r", 2 * BLOCK, 2 * BLOCK, [1, 2, 3, 4]).output())
    (held,) = side._saves._held
    assert held.saves[0].pages == [3, 4]


def loading(ranks: int = 2, **values: Any) -> tuple[Any, int]:
    """A step that loads two blocks and computes two more on them."""
    side, req = scheduler(FakeDepot(units=2), ranks=ranks, **values), request("r", 4 * BLOCK)
    admit(side, req, 0, [1, 2, 3, 4])
    step = side.build_step(Step().starts("r", 2 * BLOCK, 2 * BLOCK, [1, 2, 3, 4]).output())
    assert step.saves == {}
    return side, step.loads[0].load_id


def test_saves_of_a_step_that_loads_wait_for_every_rank() -> None:
    side, load_id = loading()
    side.reported(LoadReport({load_id: 1}))
    assert side.build_step(Step().output()).late_saves == {}
    assert side.has_late_saves()
    side.reported(LoadReport({load_id: 1}))
    assert side.build_step(Step().output()).late_saves[0].pages == [3, 4]
    assert not side.has_late_saves()


def test_saves_of_a_step_whose_load_failed_on_any_rank_are_dropped() -> None:
    """One rank's bad KV poisons everything that all ranks compute after it (P1)."""
    side, load_id = loading()
    side.reported(LoadReport({load_id: 1}).aggregate(LoadReport({load_id: 1}, {load_id})))
    assert not side.has_late_saves()
    step = side.build_step(Step().goes_on("r", 0, 4 * BLOCK, ([1, 2, 3, 4],)).output())
    assert step.late_saves == {}
    assert step.saves[0].pages == [1, 2, 3, 4]
    assert side.match(request("r", 4 * BLOCK), 0) == (0, False)


def test_a_request_whose_load_failed_is_counted_as_a_miss_once() -> None:
    side, load_id = loading()
    hits = dict(side.stats.data["hit_tokens"])
    assert "misses" not in side.stats.data
    side.reported(LoadReport({load_id: 1}, {load_id}))
    side.reported(LoadReport({load_id: 1}, {load_id}))
    assert side.stats.data["misses"] == {"failed": 1}
    assert admit(side, request("r", 4 * BLOCK), 0, [1, 2, 3, 4]) == 0
    assert side.stats.data["misses"] == {"failed": 1}
    assert side.stats.data["hit_tokens"] == hits


@pytest.mark.parametrize("from_tier", [0, 2])
def test_what_each_tier_delivered_for_a_hit_is_counted_when_its_load_ends(
    from_tier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hit that was in the pool asks the depot nothing more."""
    reads = (TierReads("Posix", 3, 9, 5), TierReads("Remote", 1, 4, 4))
    monkeypatch.setattr(FakeClaim, "poll", lambda claim: (True, 2, from_tier))
    depot = FakeDepot(units=2)
    side, req = scheduler(depot, ranks=2), request("r", 4 * BLOCK)
    admit(side, req, 0, [1, 2, 3, 4])
    (load,) = side.build_step(Step().starts("r", 2 * BLOCK, 2 * BLOCK, [1, 2, 3, 4]).output()).loads
    depot.claims[0].told_times = ClaimTimes(10, 8, 3, False, reads)
    side.reported(LoadReport({load.load_id: 1}))
    assert "tier_blocks" not in side.stats.data
    side.reported(LoadReport({load.load_id: 1}))
    assert depot.claims[0].released
    assert side.stats.data.get("tier_blocks") == ({"Posix": 3, "Remote": 1} if from_tier else None)
    assert depot.claims[0].times_asked == bool(from_tier)


class FakeManager:
    """vLLM's ``KVCacheManager``, which has forgotten the pages of requests that were aborted or preempted."""

    def __init__(self, tables: dict[str, tuple[list[int], ...]] | None = None) -> None:
        self.evicted: set[int] = set()
        self.tables = tables or {}

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted |= block_ids

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self.tables.get(request_id, ([],))


@pytest.mark.parametrize("aborted", [True, False], ids=["aborted", "preempted"])
def test_pages_of_a_failed_load_leave_the_prefix_cache_even_if_the_request_is_gone(aborted: bool) -> None:
    """vLLM handles aborts before the step's report, and keeps the pages by hash (P1)."""
    side, load_id = loading(ranks=1)
    side.kv_cache_manager = FakeManager()
    if aborted:
        side.finished("r")
    side.reported(LoadReport({load_id: 1}, {load_id}))
    assert side.kv_cache_manager.evicted == {1, 2, 3, 4}
    assert not side.has_late_saves()
    assert side.build_step(Step().output()).late_saves == {}


def test_what_later_steps_compute_on_a_failed_load_leaves_the_prefix_cache_too() -> None:
    """Of the request itself, and of one that hit its published blocks; steps are planned before the report (P1)."""
    side, load_id = loading(ranks=1)
    side.kv_cache_manager = FakeManager()
    step = Step().starts("sharer", 2 * BLOCK, BLOCK, [9, 1, 2, 11]).starts("other", 0, BLOCK, [20])
    step.goes_on("r", 4 * BLOCK, BLOCK, ([1, 2, 3, 4, 5],), fresh=([5],))
    for name in ("sharer", "other"):
        side.new_request(request(name, 4 * BLOCK))
    side.build_step(step.output())
    side.build_step(Step().goes_on("sharer", 3 * BLOCK, BLOCK, ([9, 1, 2, 11, 12],), fresh=([12],)).output())
    for name in ("r", "sharer"):
        side.finished(name)
    side.reported(LoadReport({load_id: 1}, {load_id}))
    assert side.kv_cache_manager.evicted == {1, 2, 3, 4, 5, 11, 12}


def test_good_loads_and_blocks_that_vllm_had_itself_stay_in_the_prefix_cache() -> None:
    for failed, evicted in ((set(), set()), ({1}, {2, 3, 4})):
        side, req = scheduler(FakeDepot(units=2)), request("r", 4 * BLOCK)
        side.kv_cache_manager = FakeManager()
        admit(side, req, BLOCK, [1, 2, 3, 4])
        side.build_step(Step().starts("r", 2 * BLOCK, 2 * BLOCK, [1, 2, 3, 4]).output())
        side.reported(LoadReport({1: 1}, failed))
        assert side.kv_cache_manager.evicted == evicted


def test_saves_of_the_next_step_wait_too_while_reports_are_under_way() -> None:
    """Async scheduling plans a step before the previous one's loads are known to have succeeded."""
    side, load_id = loading()
    nxt = Step().goes_on("r", 4 * BLOCK, 1, ([1, 2, 3, 4, 5],))
    side._requests["r"].request.block_hashes.append(b"r/4")
    nxt.scheduled["r"] = BLOCK
    assert side.build_step(nxt.output()).saves == {}
    side.reported(LoadReport({load_id: 2}))
    assert side.build_step(Step().output()).late_saves[0].pages == [3, 4, 5]


def test_held_blocks_that_are_overwritten_are_not_saved() -> None:
    side, load_id = loading()
    other = request("o", 8)
    admit(side, other, 0, [4])
    side.build_step(Step().starts("o", 0, 8, [4]).output())
    side.reported(LoadReport({load_id: 2}))
    assert side.build_step(Step().output()).late_saves[0].pages == [3]


@pytest.mark.parametrize("clears_first", [True, False])
def test_a_save_whose_pages_are_reused_in_the_step_that_releases_it_precedes_that_step(clears_first: bool) -> None:
    """Where vLLM clears new pages before anybody can dump them, the save is dropped (P1)."""
    side, load_id = loading(step_order=StepOrder(clears_first=clears_first))
    admit(side, request("o", 8), 0, [4])
    side.reported(LoadReport({load_id: 2}))
    step = side.build_step(Step().starts("o", 0, 8, [4]).output())
    assert step.late_saves[0].pages == ([3] if clears_first else [3, 4])
    assert step.fresh_pages == [4]


def test_pages_of_a_local_hit_that_vllm_discards_are_fenced() -> None:
    """With bounded replay a short hit is computed anew, in new pages (P3)."""
    side, req = scheduler(FakeDepot()), request("r", 2 * BLOCK)
    side.match(req, BLOCK)
    side.allocated(req, pages([7, 8]), 0)
    assert sorted(side.build_step(Step().starts("r", 0, 2 * BLOCK, [7, 8]).output()).fresh_pages) == [7, 8]


def test_pages_that_are_read_are_not_fenced() -> None:
    side, req = scheduler(FakeDepot()), request("r", 4 * BLOCK)
    admit(side, req, 2 * BLOCK, [1, 2, 3, 4])
    step = side.build_step(Step().starts("r", 2 * BLOCK, 2 * BLOCK, [1, 2, 3, 4]).output())
    assert step.fresh_pages == [3, 4]


def test_a_preempted_request_is_matched_and_saved_anew() -> None:
    side, req = scheduler(FakeDepot()), request("r", 2 * BLOCK)
    admit(side, req, 0, [1, 2])
    assert side.build_step(Step().starts("r", 0, 2 * BLOCK, [1, 2]).output()).saves[0].pages == [1, 2]
    admit(side, req, 0, [5, 6])
    again = Step(resumed={"r"}).goes_on("r", 0, 2 * BLOCK, ([5, 6],), fresh=([5, 6],))
    step = side.build_step(again.output())
    assert step.saves[0].pages == [5, 6]
    assert step.fresh_pages == [5, 6]


def test_reset_forgets_what_is_held_and_offered() -> None:
    side, _ = loading()
    side.match(request("o", 4 * BLOCK), 0)
    assert side.reset() is True
    assert not side.has_late_saves()
    assert side._depot.claims[-1].released
    assert side._depot.resets == []


def test_one_broken_rank_turns_the_connector_off_for_all() -> None:
    depot = FakeDepot(units=8)
    side = scheduler(depot, ranks=2)
    waiting = request("waiting", 200)
    assert side.match(waiting, 0)[0]
    side.reported(LoadReport().aggregate(LoadReport(broken="other bytes came back")))
    assert depot.claims[0].released
    assert side.match(waiting, 0) == (0, False)
    assert side.match(request("later", 200), 0) == (0, False)
    assert len(depot.claims) == 1
