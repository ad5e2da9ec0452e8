"""One lookup: which answer comes when, and why a request was given nothing."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import BLOCK, FakeClaim, FakeDepot, Step, found, geometry, options, pages, request, scheduler

from kvdepot import block_hash
from kvdepot.engines.vllm.lookup import MISSES, PENDING, Bounds, Hit, IdleTime, Lookup, Miss, Patience
from kvdepot.engines.vllm.meta import LoadReport
from kvdepot.engines.vllm.namespaces import RANK_STEPS_MAX
from kvdepot.engines.vllm.rates import Rates
from kvdepot.engines.vllm.scheduler import SchedulerSide


def lookup(claim: FakeClaim, wait_ms: int = 1000, early: bool = True, dropped: int = 0) -> Lookup:
    bounds = Bounds(claim.skip, claim.limit, dropped)
    return Lookup(claim, claim.skip * BLOCK, bounds, geometry(), Patience(wait_ms, early), 100.0, Rates())  # type: ignore[arg-type]


def idle(is_idle: bool = True) -> IdleTime:
    time = IdleTime()
    time.begin_step(is_idle)
    return time


def test_a_lookup_is_pending_until_the_claim_is_settled() -> None:
    claim = FakeClaim(units=3, settled=False, skip=1, limit=4)
    one = lookup(claim)
    assert one.poll(100.5, idle(False)) == PENDING
    claim.settled = True
    assert one.poll(100.6, idle(False)) == Hit(2 * BLOCK, 0)


def test_a_lookup_ends_when_the_time_of_the_policy_is_over() -> None:
    one = lookup(FakeClaim(units=3, settled=False, skip=0, limit=4))
    assert one.poll(100.999, idle(False)) == PENDING
    assert one.poll(101.0, idle(False)) == Hit(3 * BLOCK, 0)
    assert lookup(FakeClaim(units=0, settled=False, skip=0, limit=4)).poll(101.0, idle(False)) == Miss("late", block=0)


def test_a_claim_that_the_depot_had_let_go_is_waited_for_anew() -> None:
    """While vLLM asked for nothing, the depot let the claim go. It was opened again, and reads blocks from a tier."""
    claim = FakeClaim(units=4, settled=True, skip=0, limit=4)
    one = lookup(claim)
    assert isinstance(one.poll(100.5, idle(False)), Hit)
    claim.settled = False
    assert one.poll(160.0, idle(False)) == PENDING
    assert one.hit is None
    assert one.poll(160.9, idle(False)) == PENDING
    assert isinstance(one.poll(161.0, idle(False)), Hit)


def test_a_pending_claim_that_the_depot_had_let_go_is_waited_for_anew_once() -> None:
    """Its blocks have not been read meanwhile, so it is not late at once. With long steps that must end some time."""
    claim = FakeClaim(units=0, settled=False, skip=0, limit=4)
    one = lookup(claim)
    assert one.poll(100.5, idle(False)) == PENDING
    claim.openings += 1
    assert one.poll(160.0, idle(False)) == PENDING
    assert one.poll(160.9, idle(False)) == PENDING
    claim.openings += 1
    assert one.poll(161.0, idle(False)) == Miss("late", block=0)


def test_a_miss_says_which_block_is_not_there() -> None:
    claim = FakeClaim(units=2, settled=True, skip=2, limit=4)
    assert lookup(claim).poll(100.0, idle()) == Miss("unknown", block=2)
    assert lookup(FakeClaim(units=1, settled=True, skip=0, limit=4), dropped=1).poll(100.0, idle()) == Miss(
        "unknown", block=1
    )


def test_a_steps_idle_time_is_given_once() -> None:
    claims = [FakeClaim(units=3, settled=False, skip=0, limit=4) for _ in range(3)]
    time = idle()
    for claim in claims:
        assert lookup(claim).poll(100.0, time) == PENDING
    assert [len(claim.waits) for claim in claims] == [1, 0, 0]
    time.begin_step(idle=True)
    lookup(claims[2]).poll(100.0, time)
    assert len(claims[2].waits) == 1


def test_a_claim_that_is_settled_leaves_the_idle_time_to_others() -> None:
    time = idle()
    lookup(FakeClaim(units=3, settled=True, skip=0, limit=4)).poll(100.0, time)
    assert time.take_ms() > 0


def test_blocks_of_a_tier_count_no_more_than_the_hit() -> None:
    claim = FakeClaim(units=3, settled=True, skip=1, limit=4)
    claim.poll = lambda: (True, 3, 9)  # type: ignore[method-assign]
    assert lookup(claim).poll(100.0, idle()) == Hit(2 * BLOCK, 2 * BLOCK)


def why(side: SchedulerSide, req: Any, local: int = 0, external: int | None = None) -> str:
    """Returns the reason that is counted when the request is admitted."""
    tokens, _ = side.match(req, local)
    side.allocated(req, pages(list(range(1, 20))), (tokens or 0) if external is None else external)
    (reason,) = side.stats.data["misses"]
    assert reason in MISSES
    return reason


def one_rank_of_two(depot: Any) -> SchedulerSide:
    side = SchedulerSide(depot, options(), geometry(), 2)
    side.reported(LoadReport(ranks=[found(0)]))
    for _ in range(RANK_STEPS_MAX):
        side.build_step(Step().output())
    return side


def turned_off(depot: Any) -> SchedulerSide:
    side = scheduler(depot)
    side.reported(LoadReport(broken="other bytes came back"))
    return side


def in_doubt(depot: Any) -> SchedulerSide:
    side = scheduler(depot)
    side.reported(LoadReport(moved=0))
    return side


def after_a_failure(depot: Any, req: Any) -> SchedulerSide:
    side = scheduler(depot)
    side.new_request(req)
    side._requests[req.request_id].load_failed = True
    return side


def without_a_depot() -> Any:
    depot = FakeDepot(units=0)
    depot.attached = False
    return depot


def test_every_miss_has_a_reason() -> None:
    req = request("r", 4 * BLOCK)
    assert why(scheduler(FakeDepot(units=0)), req) == "unknown"
    assert why(scheduler(FakeDepot(units=0, settled=False), wait_ms=0), req) == "late"
    assert why(scheduler(without_a_depot()), req) == "no_depot"
    assert why(one_rank_of_two(FakeDepot(units=9)), req) == "ranks"
    assert why(turned_off(FakeDepot(units=9)), req) == "off"
    assert why(in_doubt(FakeDepot(units=9)), req) == "weights"
    assert why(scheduler(FakeDepot(units=9), loads=False), req) == "role"
    assert why(after_a_failure(FakeDepot(units=9), req), req) == "failed"
    assert why(scheduler(FakeDepot(units=9), persist_token_threshold=1000), req) == "short"
    assert why(scheduler(FakeDepot(units=9)), request("r", BLOCK - 1)) == "short"
    assert why(scheduler(FakeDepot(units=9)), req, local=3 * BLOCK) == "own_cache"
    assert why(scheduler(FakeDepot(units=9)), req, external=0) == "not_taken"
    assert why(scheduler(FakeDepot(units=9)), request("r", 4 * BLOCK, max_load_tokens=1)) == "asked"
    for settled in (True, False):
        strict = request("r", 4 * BLOCK, kv_load_tiers=[])
        assert why(scheduler(FakeDepot(units=0, settled=settled)), strict) == "excluded"
    near = request("r", 4 * BLOCK, kv_load_tiers=[{"locality": "REMOTE"}])
    assert why(scheduler(FakeDepot(units=0), tiers=("Slab", "Remote")), near) == "excluded"
    req.skip_reading_prefix_cache = True
    assert why(scheduler(FakeDepot(units=9)), req) == "asked"


def test_an_adapter_that_is_not_to_be_trusted_is_a_reason() -> None:
    req = request("r", 4 * BLOCK)
    req.lora_request = SimpleNamespace(lora_name="a", lora_path="/nowhere/at/all", lora_int_id=1)
    assert why(scheduler(FakeDepot(units=9)), req) == "adapter"


def test_a_request_is_counted_once_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    side, req = scheduler(FakeDepot(units=1)), request("r", 4 * BLOCK)
    with caplog.at_level(logging.DEBUG, "vllm.kvdepot"):
        for _ in range(3):  # it waits for admission, and is preempted
            assert side.match(req, BLOCK) == (0, False)
        for _ in range(2):
            side.allocated(req, pages([1, 2, 3, 4]), 0)
    assert side.stats.data["misses"] == {"unknown": 1}
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "DEBUG"]
    missed = block_hash(req.block_hashes[1]).hex()
    assert f"request_id: r, nothing from the depot (block 1, hash {missed})" in said


def test_a_claim_carries_the_name_of_its_request() -> None:
    depot = FakeDepot(units=1)
    side = scheduler(depot)
    side.match(request("cmpl-7", 4 * BLOCK), 0)
    assert [claim.label for claim in depot.claims] == ["cmpl-7"]


def test_a_hit_is_no_miss() -> None:
    side, req = scheduler(FakeDepot(units=1)), request("r", 4 * BLOCK)
    tokens, _ = side.match(req, 0)
    side.allocated(req, pages([1, 2, 3, 4]), tokens or 0)
    assert not [name for name in side.stats.data if name.startswith("misses")]


def test_a_request_with_the_name_of_an_earlier_one_is_asked_for_anew() -> None:
    depot = FakeDepot(units=9, settled=False)
    side = scheduler(depot)
    assert side.match(request("r", 4 * BLOCK), 0) == (None, False)
    other = request("r", 4 * BLOCK)
    other.block_hashes = [f"other/{index}".encode() for index in range(4)]
    depot.settled = True
    tokens, _ = side.match(other, 0)
    assert tokens
    assert len(depot.claims) == 2
    assert depot.claims[0].released
    side.allocated(other, pages(list(range(1, 20))), tokens)
    (load,) = side.build_step(Step().output()).loads
    assert "other/0" in str(load)
    assert "r/0" not in str(load).replace("other/0", "")
