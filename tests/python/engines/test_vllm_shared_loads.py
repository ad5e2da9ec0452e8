"""Requests that share a prefix which one of them is loading: the others wait for it instead of loading it again."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import BLOCK, FakeDepot, Step, pages, request, scheduler

from kvdepot.engines.vllm.meta import LoadReport
from kvdepot.engines.vllm.scheduler import SchedulerSide
from kvdepot.engines.vllm.shared_loads import WAIT_S_MAX, SharedLoads
from kvdepot.engines.vllm.turns import PENDING_CLAIMS_PER_STEP


class Clock:
    """The scheduler's time, which a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("kvdepot.engines.vllm.scheduler.time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def of_prefix(name: str, shared: int, blocks: int) -> Any:
    """A request of ``blocks`` blocks and a token, whose first ``shared`` blocks every such request has."""
    made = request(name, blocks * BLOCK + 1)
    made.block_hashes[:shared] = [f"shared/{index}".encode() for index in range(shared)]
    return made


def between_steps(**values: Any) -> SchedulerSide:
    return scheduler(FakeDepot(units=99), use_layerwise=False, **values)


def loading(side: SchedulerSide, leader: Any) -> int:
    """Admits a request, whose load begins. Returns the number of the load."""
    tokens, is_async = side.match(leader, 0)
    assert is_async
    assert tokens
    side.allocated(leader, pages(list(range(1, 2 + tokens // BLOCK))), tokens)
    (load,) = side.build_step(Step().output()).loads
    return int(load.load_id)


def test_a_request_waits_for_the_load_of_its_prefix_and_then_hits_vllms_own_cache() -> None:
    side = between_steps()
    load_id = loading(side, of_prefix("leader", 8, 8))
    follower = of_prefix("follower", 8, 8)
    assert [side.match(follower, 0) for _ in range(3)] == [(None, False)] * 3
    assert "shared_load_tokens" not in side.stats.data
    side.reported(LoadReport({load_id: 1}))
    assert side.match(follower, 8 * BLOCK) == (0, False)
    side.allocated(follower, pages(list(range(1, 10))), 0)
    assert side.build_step(Step().output()).loads == []
    assert side.stats.data["shared_load_tokens"] == 8 * BLOCK


@pytest.mark.parametrize("filters", [[], [{"medium": "CPU"}]])
def test_a_request_that_chooses_its_tiers_does_not_wait_for_the_load_of_another(filters: Any) -> None:
    """The other one may be loaded from a tier that this one excludes."""
    side = between_steps()
    loading(side, of_prefix("leader", 8, 8))
    strict = of_prefix("strict", 8, 8)
    strict.kv_transfer_params = {"kv_load_tiers": filters}
    assert side.match(strict, 0) == (8 * BLOCK, True)


def test_what_the_other_load_does_not_bring_is_loaded_after_it() -> None:
    side = between_steps()
    load_id = loading(side, of_prefix("leader", 8, 8))
    follower = of_prefix("follower", 8, 12)
    assert side.match(follower, 0) == (None, False)
    side.reported(LoadReport({load_id: 1}))
    assert side.match(follower, 8 * BLOCK) == (4 * BLOCK, True)
    side.allocated(follower, pages(list(range(1, 14))), 4 * BLOCK)
    (load,) = side.build_step(Step().output()).loads
    assert load.blocks[0].hashes == follower.block_hashes[8:12]


@pytest.mark.parametrize(
    ("leader_blocks", "follower_blocks"),
    [(17, 8), (8, 17)],
    ids=["the other load has more beyond", "more has to be loaded afterwards"],
)
def test_a_wait_that_costs_more_than_it_saves_does_not_begin(leader_blocks: int, follower_blocks: int) -> None:
    side = between_steps()
    loading(side, of_prefix("leader", 8, leader_blocks))
    assert side.match(of_prefix("follower", 8, follower_blocks), 0) == (follower_blocks * BLOCK, True)
    assert "shared_load_tokens" not in side.stats.data


def test_a_request_loads_everything_itself_if_the_other_load_fails() -> None:
    side = between_steps()
    load_id = loading(side, of_prefix("leader", 8, 8))
    follower = of_prefix("follower", 8, 8)
    assert side.match(follower, 0) == (None, False)
    side.reported(LoadReport({load_id: 1}, failed={load_id}))
    assert side.match(follower, 0) == (8 * BLOCK, True)


def test_nobody_waits_for_the_load_of_a_request_that_was_aborted() -> None:
    """vLLM frees its pages and caches none of them."""
    side = between_steps()
    loading(side, of_prefix("leader", 8, 8))
    follower = of_prefix("follower", 8, 8)
    assert side.match(follower, 0) == (None, False)
    side.finished("leader")
    assert side.match(follower, 0) == (8 * BLOCK, True)


def test_a_follower_that_is_asked_before_its_leader_is_cached_waits_one_more_step() -> None:
    """vLLM up to 0.31 asks for it in the step that caches the leader's pages, if it is ahead in the queue."""
    side = between_steps()
    load_id = loading(side, of_prefix("leader", 8, 8))
    follower = of_prefix("follower", 8, 8)
    side.reported(LoadReport({load_id: 1}))
    assert side.match(follower, 0) == (None, False)
    side.build_step(Step().output())
    assert side.match(follower, 0) == (8 * BLOCK, True)


def test_requests_of_whole_blocks_wait_once_and_then_load_their_last_block_side_by_side() -> None:
    """vLLM's own cache never has the last token of a prompt, so it cannot give them the last block."""
    side = between_steps()
    load_id = loading(side, request("same", 8 * BLOCK))
    followers = [request("same", 8 * BLOCK) for _ in range(4)]
    for number, follower in enumerate(followers):
        follower.request_id = f"follower{number}"
        assert side.match(follower, 0) == (None, False)
    side.reported(LoadReport({load_id: 1}))
    for follower in followers:
        assert side.match(follower, 7 * BLOCK) == (BLOCK, True)
        side.allocated(follower, pages(list(range(1, 9))), BLOCK)
    late = request("same", 8 * BLOCK)
    late.request_id = "late"
    assert side.match(late, 7 * BLOCK) == (BLOCK, True)
    assert side.stats.data["shared_load_tokens"] == 4 * 7 * BLOCK


def test_a_thousand_requests_that_wait_cost_the_depot_no_call() -> None:
    side = between_steps()
    loading(side, of_prefix("leader", 8, 8))
    depot: Any = side._depot
    claims = len(depot.claims)
    followers = [of_prefix(f"follower{number}", 8, 8) for number in range(1_000)]
    for _ in range(2):
        assert [side.match(follower, 0) for follower in followers] == [(None, False)] * 1_000
        side.build_step(Step().output())
    assert len(depot.claims) == claims


def test_requests_whose_claim_shows_that_they_share_open_few_claims_in_a_step() -> None:
    """They might need much beyond the prefix; the depot has no more, which only a claim shows."""
    side = scheduler(FakeDepot(units=8), use_layerwise=False)
    loading(side, of_prefix("leader", 8, 8))
    depot: Any = side._depot
    followers = [of_prefix(f"follower{number}", 8, 30) for number in range(100)]
    assert [side.match(follower, 0) for follower in followers] == [(None, False)] * 100
    assert len(depot.claims) == 1 + PENDING_CLAIMS_PER_STEP
    polls = sum(claim.polls for claim in depot.claims)
    side.build_step(Step().output())
    waiting = followers[:PENDING_CLAIMS_PER_STEP]
    assert [side.match(follower, 0) for follower in waiting] == [(None, False)] * len(waiting)
    assert sum(claim.polls for claim in depot.claims) == polls


def test_a_load_that_hangs_costs_other_requests_a_bounded_wait(clock: Clock) -> None:
    side = between_steps()
    loading(side, of_prefix("leader", 8, 8))
    follower = of_prefix("follower", 8, 8)
    assert side.match(follower, 0) == (None, False)
    clock.now_s += WAIT_S_MAX / 2
    assert side.match(follower, 0) == (None, False)
    clock.now_s += WAIT_S_MAX / 2
    assert side.match(follower, 0) == (8 * BLOCK, True)


def test_a_request_waits_for_one_load_only() -> None:
    side = between_steps()
    follower = of_prefix("follower", 8, 8)
    load_id = loading(side, of_prefix("leader", 8, 8))
    assert side.match(follower, 0) == (None, False)
    side.reported(LoadReport({load_id: 1}, failed={load_id}))
    loading(side, of_prefix("another", 8, 8))
    assert side.match(follower, 0) == (8 * BLOCK, True)


def test_the_load_of_one_rank_alone_is_no_prefix_for_others() -> None:
    side = between_steps(ranks=2)
    load_id = loading(side, of_prefix("leader", 8, 8))
    follower = of_prefix("follower", 8, 8)
    side.reported(LoadReport({load_id: 1}))
    side.build_step(Step().output())
    assert side.match(follower, 0) == (None, False)
    side.reported(LoadReport({load_id: 1}))
    side.build_step(Step().output())
    assert side.match(follower, 0) == (8 * BLOCK, True)


def test_without_a_prefix_cache_of_vllms_own_nobody_waits() -> None:
    side = between_steps(shares_prefixes=False)
    loading(side, of_prefix("leader", 8, 8))
    assert side.match(of_prefix("follower", 8, 8), 0) == (8 * BLOCK, True)


@pytest.mark.parametrize(("shared", "waits"), [(8, True), (7, False)])
def test_with_windows_only_the_same_hit_is_waited_for(shared: int, waits: bool) -> None:
    """A window of a hit that ends elsewhere has other blocks, which the load left out."""
    side = scheduler(FakeDepot(units=99), use_layerwise=False, windows=(0, 2))
    leader = of_prefix("leader", 8, 8)
    tokens, _ = side.match(leader, 0)
    side.allocated(leader, pages(list(range(1, 10)), list(range(1, 10))), tokens or 0)
    assert side.match(of_prefix("follower", shared, 8), 0) == ((None, False) if waits else (8 * BLOCK, True))
    assert side.match(of_prefix("shorter", 8, 7), 0) == (7 * BLOCK, True)


def test_with_windows_nobody_waits_for_a_load_that_ends_within_its_prompt() -> None:
    """vLLM keeps the blocks of a window at the end of a prompt, and maybe nowhere else."""
    side = scheduler(FakeDepot(units=8), use_layerwise=False, windows=(0, 2))
    leader = of_prefix("leader", 8, 9)
    tokens, _ = side.match(leader, 0)
    side.allocated(leader, pages(list(range(1, 11)), list(range(1, 11))), tokens or 0)
    assert side.match(of_prefix("follower", 8, 9), 0) == (8 * BLOCK, True)


def test_loads_that_a_step_waits_for_hold_nobody_up() -> None:
    side = scheduler(FakeDepot(units=99))
    leader = of_prefix("leader", 8, 8)
    tokens, _ = side.match(leader, 0)
    side.allocated(leader, pages(list(range(1, 10))), tokens or 0)
    assert side.match(of_prefix("follower", 8, 8), 0) == (8 * BLOCK, False)


def test_the_shared_part_is_what_one_load_brings_and_no_more() -> None:
    """Compares with a plain search over random trees of prefixes, while loads that do not overlap begin and end."""
    random_ = random.Random(14)
    shared = SharedLoads()
    running: dict[int, tuple[set[bytes], int]] = {}
    waits = 0
    for number in range(3_000):
        depth = random_.randrange(1, 12)
        path = [str(random_.randrange(10) // 9) for _ in range(depth)]
        # A key determines all keys before it.
        keys = ["/".join(path[: index + 1]).encode() for index in range(depth)]
        begin = random_.randrange(depth)
        if running and random_.random() < 0.3:
            gone = random_.choice(list(running))
            del running[gone]
            shared.forget(gone)
        brought = [
            (sum(key in loaded for key in keys[begin:]), keys[begin] in loaded, load_id, end)
            for load_id, (loaded, end) in running.items()
        ]
        part, load_id, end = next(((part, load_id, end) for part, begins, load_id, end in brought if begins), (0, 0, 0))
        own_end = depth - random_.randrange(2)
        part = min(part, max(0, own_end - begin))
        is_worth = part > 0 and part >= max(end - begin - part, depth - begin - part)
        found = shared.find(keys, begin, depth, own_end)
        assert found == (load_id if is_worth else None)
        waits += found is not None
        if not any(part for part, _, _, _ in brought):
            running[number] = (set(keys[begin:]), depth)
            shared.begin(number, keys, begin, depth)
    assert waits > 100
    for number in list(running):
        shared.ended(number)
    assert shared._loads.keys() == running.keys()
    shared.step_planned()
    assert not shared._load_of
    assert not shared._loads
