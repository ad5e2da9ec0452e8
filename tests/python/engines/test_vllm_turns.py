"""A step of the scheduler makes a bounded number of requests to the depot, however many requests wait (P2)."""

from engine_parts import BLOCK, FakeDepot, Step, request, scheduler

from kvdepot.engines.vllm.turns import (
    FIRST_POLLS,
    OTHER_POLLS,
    PENDING_CLAIMS_PER_STEP,
    POLLS_PER_STEP,
    RELEASES_PER_STEP,
)

WAITING = 1000
WAIT_MS = 10**9
"""The steps of a test may take any time; a claim that waits for longer than this is settled."""


def walk(side, requests, local_tokens=0):  # type: ignore[no-untyped-def]
    """Runs one step, in which nothing is admitted: vLLM asks for every waiting request, in the queue's order."""
    answers = [side.match(one, local_tokens) for one in requests]
    side.build_step(Step().output())
    return answers


def test_a_step_makes_a_bounded_number_of_claims_and_polls() -> None:
    depot = FakeDepot(units=9, settled=False)
    side, requests = scheduler(depot, wait_ms=WAIT_MS), [request(f"r{number}", 4 * BLOCK) for number in range(WAITING)]
    polls = 0
    for _ in range(100):
        claims_before, polls_before = len(depot.claims), polls
        assert set(walk(side, requests)) == {(None, False)}
        polls = sum(claim.polls for claim in depot.claims)
        new = len(depot.claims) - claims_before
        assert new <= PENDING_CLAIMS_PER_STEP
        # An idle step waits for one claim, which polls it once more.
        assert polls - polls_before - new <= POLLS_PER_STEP + 2
    assert len(depot.claims) == WAITING


def test_every_pending_claim_is_polled_in_turn() -> None:
    depot = FakeDepot(units=9, settled=False)
    side, requests = scheduler(depot, wait_ms=WAIT_MS), [request(f"r{number}", 4 * BLOCK) for number in range(WAITING)]
    for _ in range(WAITING // PENDING_CLAIMS_PER_STEP + 1):
        walk(side, requests)
    for claim in depot.claims:
        claim.settled = True
    # A claim that settles is a hit as soon as it is polled: all within one round.
    rounds = -(-WAITING // OTHER_POLLS) + 1
    for _ in range(rounds):
        found = walk(side, requests)
    assert all(answer == (3 * BLOCK, False) for answer in found)


def test_requests_at_the_head_are_polled_in_every_step() -> None:
    depot = FakeDepot(units=9, settled=False)
    side, requests = scheduler(depot, wait_ms=WAIT_MS), [request(f"r{number}", 4 * BLOCK) for number in range(WAITING)]
    for _ in range(WAITING // PENDING_CLAIMS_PER_STEP + 1):
        walk(side, requests)
    for claim in depot.claims[:FIRST_POLLS]:
        claim.settled = True
    found = walk(side, requests)
    assert found[:FIRST_POLLS] == [(3 * BLOCK, False)] * FIRST_POLLS


def test_claims_that_settle_immediately_are_not_limited() -> None:
    """vLLM admits those requests; a limit would make its batches smaller."""
    depot = FakeDepot(units=9)
    side, requests = scheduler(depot, wait_ms=WAIT_MS), [request(f"r{number}", 4 * BLOCK) for number in range(WAITING)]
    assert set(walk(side, requests)) == {(3 * BLOCK, False)}
    assert len(depot.claims) == WAITING


def test_few_pending_claims_are_polled_in_every_step() -> None:
    depot = FakeDepot(units=9, settled=False)
    side, requests = (
        scheduler(depot, wait_ms=WAIT_MS),
        [request(f"r{number}", 4 * BLOCK) for number in range(FIRST_POLLS + OTHER_POLLS)],
    )
    walk(side, requests)
    before = [claim.polls for claim in depot.claims]
    walk(side, requests)
    assert all(claim.polls > polls for claim, polls in zip(depot.claims, before, strict=True))


def pending(depot, **values):  # type: ignore[no-untyped-def]
    """A scheduler with a pending claim for each waiting request, and those requests."""
    side = scheduler(depot, wait_ms=WAIT_MS, **values)
    requests = [request(f"r{number}", 4 * BLOCK) for number in range(WAITING)]
    for _ in range(WAITING // PENDING_CLAIMS_PER_STEP + 1):
        walk(side, requests)
    assert len(depot.claims) == WAITING
    return side, requests


def test_a_longer_local_hit_of_all_waiting_requests_keeps_their_claims() -> None:
    """They have one prefix, and the first that was admitted has computed it."""
    depot = FakeDepot(units=9, settled=False)
    side, requests = pending(depot)
    walk(side, requests, BLOCK)
    assert len(depot.claims) == WAITING
    assert not any(claim.released for claim in depot.claims)
    for claim in depot.claims:
        claim.settled = True
    for _ in range(-(-WAITING // OTHER_POLLS) + 1):
        found = walk(side, requests, BLOCK)
    assert all(answer == (2 * BLOCK, False) for answer in found)


def test_a_step_releases_a_bounded_number_of_claims_when_local_hits_change() -> None:
    """With a window a claim cannot be kept. The wait for the tiers goes on with the next one."""
    depot = FakeDepot(units=9, settled=False)
    side, requests = pending(depot, windows=(0, 2))
    began = {one.request_id: side._requests[one.request_id].lookup.started_s for one in requests}
    released = 0
    for _ in range(WAITING // RELEASES_PER_STEP + 1):
        assert set(walk(side, requests, BLOCK)) == {(None, False)}
        before, released = released, sum(claim.released for claim in depot.claims)
        assert released - before <= RELEASES_PER_STEP
    assert released == WAITING
    assert {one.request_id: side._requests[one.request_id].lookup.started_s for one in requests} == began


def test_the_wait_for_admission_is_no_wait_for_a_tier() -> None:
    depot = FakeDepot(units=9)
    side, one = scheduler(depot, wait_ms=WAIT_MS, windows=(0, 2)), request("r", 4 * BLOCK)
    assert side.match(one, 0)[0]
    began = side._requests["r"].lookup.started_s
    side.match(one, BLOCK)
    assert side._requests["r"].lookup.started_s > began
