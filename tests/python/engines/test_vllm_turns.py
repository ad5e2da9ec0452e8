"""A step of the scheduler makes a bounded number of requests to the depot, however many requests wait (P2)."""

from engine_parts import BLOCK, FakeDepot, Step, request, scheduler

from kvdepot.engines.vllm.turns import FIRST_POLLS, OTHER_POLLS, PENDING_CLAIMS_PER_STEP, POLLS_PER_STEP

WAITING = 1000
WAIT_MS = 10**9
"""The steps of a test may take any time; a claim that waits for longer than this is settled."""


def walk(side, requests):  # type: ignore[no-untyped-def]
    """Runs one step, in which nothing is admitted: vLLM asks for every waiting request, in the queue's order."""
    answers = [side.match(one, 0) for one in requests]
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
