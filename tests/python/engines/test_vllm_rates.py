"""P9: a request waits for a tier only as long as computing would take longer."""

import pytest
from engine_parts import BLOCK, FakeClaim, FakeDepot, Step, geometry, pages, request, scheduler

from kvdepot.engines.vllm import scheduler as scheduler_module
from kvdepot.engines.vllm.lookup import PENDING, Bounds, Hit, IdleTime, Lookup, Miss, Patience
from kvdepot.engines.vllm.meta import LoadReport
from kvdepot.engines.vllm.rates import LOSS_FACTOR, SAMPLES_MIN, STEP_TOKENS_MIN, STEPS_MAX, TOKENS_MIN, Rates
from kvdepot.engines.vllm.reads import EVIDENCE_S, FORGET_S, LATENCY_S, Reads
from kvdepot.engines.vllm.scheduler import SchedulerSide

TOKENS = 1000


def measured(seconds_per_1000: float = 1.0) -> Rates:
    """Returns measurements of an engine that takes this long for a thousand tokens."""
    rates = Rates()
    for number in range(SAMPLES_MIN):
        step = rates.step_began(TOKENS, 0, 10.0 * number)
        rates.step_ended(step, 10.0 * number + seconds_per_1000)
    return rates


def test_steps_that_overlap_in_their_planning_are_measured_one_after_the_other() -> None:
    rates = Rates()
    # Planned while the previous one still computes, as with asynchronous scheduling.
    steps = [rates.step_began(TOKENS, 0, 0.1 * number) for number in range(4)]
    for number, step in enumerate(steps):
        rates.step_ended(step, float(number + 1))
    assert rates.compute.of(TOKENS) == pytest.approx(1.0)


def test_small_steps_tell_nothing_and_few_steps_too_little() -> None:
    rates = Rates()
    assert rates.step_began(STEP_TOKENS_MIN - 1, 0, 0.0) == 0
    for number in range(SAMPLES_MIN):
        assert rates.compute.of(1) is None
        rates.step_ended(rates.step_began(TOKENS, 0, 10.0 * number), 10.0 * number + 1)
    assert rates.compute.of(1) == pytest.approx(1.0 / TOKENS)


def test_one_long_step_tells_enough() -> None:
    """After a restart, the second request must not wait for a disk that is slower than a GPU."""
    rates = Rates()
    rates.step_ended(rates.step_began(TOKENS_MIN, 0, 0.0), 0.5)
    assert rates.compute.of(2 * TOKENS_MIN) == pytest.approx(1.0)


def test_steps_that_decode_or_wait_for_loads_are_not_measured() -> None:
    rates = Rates()
    assert rates.step_began(TOKENS, TOKENS, 0.0) == 0, "a thousand requests that decode"
    assert rates.step_began(TOKENS, TOKENS // 2, 0.0) == 0
    assert rates.step_began(TOKENS, 0, 0.0, waits=True) == 0
    assert rates.step_began(TOKENS, 16, 0.0) != 0


def test_a_step_behind_one_that_was_not_measured_counts_as_an_upper_bound() -> None:
    rates = measured()
    rates.step_began(64, 64, 100.0)
    # With asynchronous scheduling the first half second is the other step's.
    rates.step_ended(rates.step_began(TOKENS, 0, 100.1), 101.6)
    assert rates.compute.of(TOKENS) == pytest.approx(1.0)
    rates.step_began(64, 64, 200.0)
    rates.step_ended(rates.step_began(TOKENS, 0, 200.1), 200.6)
    assert rates.compute.of(TOKENS) < 0.9
    # Without better samples, they count.
    unknown = Rates()
    for number in range(SAMPLES_MIN):
        unknown.step_began(64, 64, 10.0 * number)
        unknown.step_ended(unknown.step_began(TOKENS, 0, 10.0 * number), 10.0 * number + 1)
    assert unknown.compute.of(TOKENS) == pytest.approx(1.0)


def test_steps_that_never_end_are_forgotten() -> None:
    rates = Rates()
    first = rates.step_began(TOKENS, 0, 0.0)
    for _ in range(STEPS_MAX):
        rates.step_began(TOKENS, 0, 0.0)
    for _ in range(SAMPLES_MIN):
        rates.step_ended(first, 9.0)
    assert rates.compute.of(1) is None


def test_an_engine_that_has_measured_nothing_waits() -> None:
    rates = Rates()
    assert not rates.loses(TOKENS, 1e9)
    rates.reads.look("one", 0, 100, 0.0)
    rates.reads.look("one", 1, 99, 1e3)
    assert not rates.will_lose(TOKENS, 99, 1e3)


def reading(reads: Reads, seconds: float, blocks_per_s: float, start_s: float = 0.0, latency_s: float = 0.0) -> float:
    """Polls a lookup every 5 ms for some time, with blocks at this rate. Returns when that was over."""
    looks = int(seconds / 0.005)
    for number in range(looks + 1):
        now_s = start_s + 0.005 * number
        come = int(max(0.0, now_s - start_s - latency_s) * blocks_per_s)
        reads.look("reader", come, 10**6, now_s)
    reads.over("reader")
    return start_s + seconds


def test_a_rate_is_that_of_the_blocks_and_not_of_the_latency_before_them() -> None:
    reads = Reads()
    # 30 ms until the first block, then one per millisecond.
    end_s = reading(reads, 0.2, 1000, latency_s=0.03)
    assert reads.seconds(1000, end_s) == pytest.approx(1.0, rel=0.05)


def test_a_tier_that_delivers_nothing_is_given_up_by_what_was_measured() -> None:
    rates = measured()
    assert rates.reads.seconds(1, 0.0) is None
    end_s = reading(rates.reads, LATENCY_S + 2 * EVIDENCE_S, 0, start_s=50.0)
    assert rates.will_lose(TOKENS, 1, end_s), "and the next request does not wait for it"


def test_lookups_that_wait_together_share_the_tier() -> None:
    reads = Reads()
    # Ten of them get a hundred blocks per second each.
    for number in range(41):
        now_s = 0.005 * number
        for lookup_of in range(10):
            reads.look(lookup_of, int(now_s * 100), 1000, now_s)
    assert reads.seconds(1000, 0.2) == pytest.approx(1.0, rel=0.1)


def test_what_came_in_a_long_step_came_at_a_moment_that_nobody_saw() -> None:
    reads = Reads()
    end_s = reading(reads, 0.5, 1000)
    known = reads.seconds(1000, end_s)
    # All blocks have arrived when the engine polls again after a step of ten seconds.
    reads.look("late", 0, 100, end_s)
    reads.look("late", 100, 0, end_s + 10)
    assert reads.seconds(1000, end_s + 10) == known


def test_a_lookup_that_was_dropped_is_not_waited_for() -> None:
    reads = Reads()
    end_s = reading(reads, 0.5, 1000)
    known = reads.seconds(1000, end_s)
    reads.look("aborted", 0, 100, end_s)
    reads.over("aborted")
    reads.look("next", 0, 100, end_s + 30)
    reads.look("next", 0, 100, end_s + 30.01)
    assert reads.seconds(1000, end_s + 30.01) == known


def test_what_comes_more_slowly_than_it_is_computed_loses() -> None:
    rates = measured()
    end_s = reading(rates.reads, 1.0, 100)
    # A second for a hundred blocks.
    as_long = round(TOKENS / LOSS_FACTOR)
    assert not rates.will_lose(as_long + 50, 100, end_s)
    assert rates.will_lose(as_long - 50, 100, end_s)


def test_a_tier_that_was_slow_is_tried_again_when_that_is_long_ago() -> None:
    rates = measured()
    end_s = reading(rates.reads, 10.0, 1)
    assert rates.will_lose(TOKENS, 10, end_s)
    later_s = end_s + FORGET_S + 1
    assert not rates.will_lose(TOKENS, 10, later_s)
    # It is fast now, and a short attempt shows that, whatever was known before.
    later_s = reading(rates.reads, 0.2, 10_000, start_s=later_s)
    assert rates.reads.seconds(10_000, later_s) == pytest.approx(1.0, rel=0.1)


def lookup(claim: FakeClaim, rates: Rates, while_faster: bool = True) -> Lookup:
    patience = Patience(100_000, begins_early=False, while_faster=while_faster)
    bounds = Bounds(claim.skip, claim.limit, 0)
    return Lookup(claim, claim.skip * BLOCK, bounds, geometry(), patience, 100.0, rates)  # type: ignore[arg-type]


def busy() -> IdleTime:
    time = IdleTime()
    time.begin_step(idle=False)
    return time


def test_a_lookup_that_waits_for_longer_than_computing_takes_what_has_come() -> None:
    claim = FakeClaim(units=2, settled=False, skip=0, limit=10)
    claim.on_their_way = (10, 0, 10, 0, 10)
    one = lookup(claim, measured())
    over_s = 10 * BLOCK / TOKENS * LOSS_FACTOR
    assert one.poll(100.0 + over_s * 0.9, busy()) == PENDING
    assert one.poll(100.0 + over_s * 1.1, busy()) == Hit(2 * BLOCK, 0, declined_tokens=8 * BLOCK)


def test_a_few_blocks_at_the_end_are_worth_what_computing_them_takes() -> None:
    """The rest of the hit is in the pool, and is not at stake."""
    claim = FakeClaim(units=99, settled=False, skip=0, limit=100)
    claim.on_their_way = (100, 99, 1, 0, 1)
    over_s = BLOCK / TOKENS * LOSS_FACTOR
    one = lookup(claim, measured())
    assert one.poll(100.0 + over_s * 0.9, busy()) == PENDING
    assert one.poll(100.0 + over_s * 1.1, busy()) == Hit(99 * BLOCK, 0, declined_tokens=BLOCK)


def test_one_block_without_which_nothing_is_hit_is_worth_the_whole_hit() -> None:
    """A straggler at the beginning, or a window that is not complete."""
    rates = measured()
    reading(rates.reads, 1.0, 10)
    claim = FakeClaim(units=0, settled=False, skip=0, limit=100)
    claim.on_their_way = (100, 0, 100, 99, 1)
    # A tenth of a second for it; the hit takes 1.6 s to compute.
    assert lookup(claim, rates).poll(100.5, busy()) == PENDING


def test_a_wait_that_pays_is_not_ended_by_its_length() -> None:
    rates = measured()
    claim = FakeClaim(units=0, settled=False, skip=0, limit=1000)
    one = lookup(claim, rates)
    for come in range(0, 1000, 10):
        claim.on_their_way = (1000, come, 1000, come, 1000 - come)
        assert one.poll(100.0 + come * 0.01, busy()) == PENDING, come


def test_nothing_of_it_is_a_miss_that_says_so() -> None:
    claim = FakeClaim(units=0, settled=False, skip=0, limit=10)
    claim.on_their_way = (10, 0, 10, 0, 10)
    assert lookup(claim, measured()).poll(101.0, busy()) == Miss("slower", 0, declined_tokens=10 * BLOCK)
    hung = FakeClaim(units=0, settled=False, skip=0, limit=10)
    assert lookup(hung, measured()).poll(101.0, busy()) == Miss("slower", 0)


def test_who_asked_to_wait_for_all_waits() -> None:
    claim = FakeClaim(units=2, settled=False, skip=0, limit=10)
    claim.on_their_way = (10, 0, 10, 0, 10)
    assert lookup(claim, measured(), while_faster=False).poll(110.0, busy()) == PENDING


def measured_by(side: SchedulerSide, now: list[float]) -> None:
    """Makes a scheduler measure that it computes a thousand tokens per second."""
    for number in range(SAMPLES_MIN):
        step = side.build_step(Step(scheduled={"other": TOKENS}).output())
        assert step.timed == number + 1
        now[0] += 1.0
        side.reported(LoadReport(timed=step.timed))
        now[0] += 5.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The scheduler's clock."""
    moment = [0.0]
    monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: moment[0])
    return moment


def test_the_scheduler_measures_its_steps_and_counts_what_it_declines(now: list[float]) -> None:
    depot = FakeDepot(units=0, settled=False)
    side = scheduler(depot, wait_ms=100_000)
    measured_by(side, now)
    assert side.build_step(Step(scheduled={"other": STEP_TOKENS_MIN - 1}).output()).timed == 0
    req = request("r", 10 * BLOCK)
    assert side.match(req, 0) == (None, False)
    depot.claims[0].on_their_way = (10, 0, 10, 0, 10)
    now[0] += 1.0
    assert side.match(req, 0) == (0, False)
    side.allocated(req, pages(list(range(1, 20))), 0)
    assert side.stats.data["misses"] == {"slower": 1}
    assert side.stats.data["declined_tokens"] == 10 * BLOCK
    assert depot.claims[0].declined


def test_a_request_that_gave_up_waiting_does_not_wait_again_and_counts_once(now: list[float]) -> None:
    """While it waits for admission it looks up again, in case the blocks have arrived by then."""
    depot = FakeDepot(units=0, settled=False)
    side = scheduler(depot, wait_ms=100_000)
    measured_by(side, now)
    req = request("r", 10 * BLOCK)
    assert side.match(req, 0) == (None, False)
    depot.claims[0].on_their_way = (10, 0, 10, 0, 10)
    now[0] += 1.0
    assert side.match(req, 0) == (0, False)
    for _ in range(3):
        now[0] += 1.0
        assert side.match(req, 0) == (0, False)
    assert len(depot.claims) == 4
    depot.units, depot.settled = 6, True
    now[0] += 1.0
    assert side.match(req, 0)[0] == 6 * BLOCK
    side.allocated(req, pages(list(range(1, 20))), 6 * BLOCK)
    assert side.stats.data["declined_tokens"] == 4 * BLOCK
    assert "misses" not in side.stats.data


def test_a_steps_number_comes_back_from_all_ranks_together() -> None:
    assert LoadReport(timed=3).aggregate(LoadReport(timed=3)).timed == 3
