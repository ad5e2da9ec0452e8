"""P9: a request waits for a tier only as long as computing would take longer."""

import pytest
from engine_parts import BLOCK, FakeClaim, FakeDepot, Step, geometry, pages, request, scheduler

from kvdepot.engines.vllm import scheduler as scheduler_module
from kvdepot.engines.vllm.lookup import PENDING, Bounds, Hit, IdleTime, Lookup, Miss, Patience
from kvdepot.engines.vllm.meta import LoadReport
from kvdepot.engines.vllm.rates import FORGET_S, LOSS_FACTOR, SAMPLES_MIN, STEP_TOKENS_MIN, STEPS_MAX, Arriving, Rates

TOKENS = 1000


def measured(seconds_per_1000: float = 1.0) -> Rates:
    """What an engine knows that computes a thousand tokens in so long."""
    rates = Rates()
    for number in range(SAMPLES_MIN):
        step = rates.step_began(TOKENS, 10.0 * number)
        rates.step_ended(step, 10.0 * number + seconds_per_1000)
    return rates


def test_steps_that_overlap_in_their_planning_are_measured_one_after_the_other() -> None:
    rates = Rates()
    # Planned while the one before still computes, as with asynchronous scheduling.
    steps = [rates.step_began(TOKENS, 0.1 * number) for number in range(4)]
    for number, step in enumerate(steps):
        rates.step_ended(step, float(number + 1))
    assert rates.compute.of(TOKENS) == pytest.approx(1.0)


def test_small_steps_tell_nothing_and_few_steps_too_little() -> None:
    rates = Rates()
    assert rates.step_began(STEP_TOKENS_MIN - 1, 0.0) == 0
    for number in range(SAMPLES_MIN):
        assert rates.compute.of(1) is None
        rates.step_ended(rates.step_began(TOKENS, 10.0 * number), 10.0 * number + 1)
    assert rates.compute.of(1) == pytest.approx(1.0 / TOKENS)


def test_steps_that_never_end_are_forgotten() -> None:
    rates = Rates()
    first = rates.step_began(TOKENS, 0.0)
    for _ in range(STEPS_MAX):
        rates.step_began(TOKENS, 0.0)
    for _ in range(SAMPLES_MIN):
        rates.step_ended(first, 9.0)
    assert rates.compute.of(1) is None


def test_an_engine_that_has_measured_nothing_waits() -> None:
    rates = Rates()
    assert not rates.loses(TOKENS, 1e9)
    assert not rates.will_lose(Arriving(TOKENS, 1, 99, 1e9), 1e9)


def test_what_comes_more_slowly_than_it_is_computed_loses() -> None:
    rates = measured()
    # Half has come, so that the other half takes as long again; computing that takes half a second.
    as_long = 0.5 * LOSS_FACTOR
    assert not rates.will_lose(Arriving(TOKENS, 5, 5, as_long * 0.99), 100.0)
    assert rates.will_lose(Arriving(TOKENS, 5, 5, as_long * 1.01), 100.0)


def test_a_tier_that_was_slow_is_not_waited_for_until_that_is_long_ago() -> None:
    rates = measured()
    for _ in range(SAMPLES_MIN):
        rates.waited(100, 1.0, 100.0)
    nothing_yet = Arriving(TOKENS, 0, 10, 0.0)
    assert rates.will_lose(nothing_yet, 100.0)
    assert not rates.will_lose(nothing_yet, 101.0 + FORGET_S)
    for _ in range(20):
        rates.waited(TOKENS, 0.01, 200.0)
    assert not rates.will_lose(nothing_yet, 200.0), "it is fast now"


def lookup(claim: FakeClaim, while_faster: bool = True) -> Lookup:
    patience = Patience(100_000, begins_early=False, while_faster=while_faster)
    bounds = Bounds(claim.skip, claim.limit, 0)
    return Lookup(claim, claim.skip * BLOCK, bounds, geometry(), patience, 100.0)  # type: ignore[arg-type]


def busy() -> IdleTime:
    time = IdleTime()
    time.begin_step(idle=False)
    return time


def test_a_lookup_that_waits_for_longer_than_computing_takes_what_has_come() -> None:
    claim = FakeClaim(units=2, settled=False, skip=0, limit=10)
    claim.on_their_way = (10, 10, 0, 10)
    rates, one = measured(), lookup(claim)
    over_s = 10 * BLOCK / TOKENS * LOSS_FACTOR
    assert one.poll(100.0 + over_s * 0.9, busy(), rates) == PENDING
    assert one.poll(100.0 + over_s * 1.1, busy(), rates) == Hit(2 * BLOCK, 0, declined_tokens=8 * BLOCK)


def test_nothing_of_it_is_a_miss_that_says_so() -> None:
    claim = FakeClaim(units=0, settled=False, skip=0, limit=10)
    claim.on_their_way = (10, 10, 0, 10)
    assert lookup(claim).poll(101.0, busy(), measured()) == Miss("slower", 0, declined_tokens=10 * BLOCK)
    hung = FakeClaim(units=0, settled=False, skip=0, limit=10)
    assert lookup(hung).poll(101.0, busy(), measured()) == Miss("slower", 0)


def test_who_asked_to_wait_for_all_waits() -> None:
    claim = FakeClaim(units=2, settled=False, skip=0, limit=10)
    claim.on_their_way = (10, 10, 0, 10)
    assert lookup(claim, while_faster=False).poll(110.0, busy(), measured()) == PENDING


def test_a_read_is_measured_up_to_the_last_look_before_it_was_seen() -> None:
    claim = FakeClaim(units=10, settled=False, skip=0, limit=10)
    rates = measured()
    for _ in range(SAMPLES_MIN):
        one = lookup(claim)
        claim.settled = False
        assert one.poll(100.1, busy(), rates) == PENDING
        claim.poll = lambda: (True, 10, 10)  # type: ignore[method-assign]
        # A long step later: they have come at some time in between.
        assert one.poll(105.0, busy(), rates) == Hit(10 * BLOCK, 10 * BLOCK)
        del claim.poll
    assert not rates.will_lose(Arriving(TOKENS, 0, 10, 0.0), 105.0)


def test_the_scheduler_measures_its_steps_and_counts_what_it_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: now[0])
    depot = FakeDepot(units=0, settled=False)
    side = scheduler(depot, wait_ms=100_000)
    for number in range(SAMPLES_MIN):
        step = side.build_step(Step(scheduled={"other": TOKENS}).output())
        assert step.timed == number + 1
        now[0] += 1.0
        side.reported(LoadReport(timed=step.timed))
        now[0] += 5.0
    assert side.build_step(Step(scheduled={"other": STEP_TOKENS_MIN - 1}).output()).timed == 0
    req = request("r", 10 * BLOCK)
    assert side.match(req, 0) == (None, False)
    depot.claims[0].on_their_way = (10, 10, 0, 10)
    now[0] += 1.0
    assert side.match(req, 0) == (0, False)
    side.allocated(req, pages(list(range(1, 20))), 0)
    assert side.stats.data["misses"] == {"slower": 1}
    assert side.stats.data["declined_tokens"] == 10 * BLOCK


def test_a_steps_number_comes_back_from_all_ranks_together() -> None:
    assert LoadReport(timed=3).aggregate(LoadReport(timed=3)).timed == 3
