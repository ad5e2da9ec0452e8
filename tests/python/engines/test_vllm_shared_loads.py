"""Requests that share a prefix which one of them is loading: the others wait for it instead of loading it again."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import BLOCK, FakeDepot, Step, pages, request, scheduler

from kvdepot.engines.vllm.meta import LoadReport
from kvdepot.engines.vllm.scheduler import SchedulerSide
from kvdepot.engines.vllm.shared_loads import WAIT_S_MAX, SharedLoads


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
    side.reported(LoadReport({load_id: 1}))
    assert side.match(follower, 8 * BLOCK) == (0, False)
    side.allocated(follower, pages(list(range(1, 10))), 0)
    assert side.build_step(Step().output()).loads == []
    assert side.stats.data["shared_load_tokens"] == 8 * BLOCK


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


def test_a_load_of_a_request_that_was_aborted_still_counts_until_it_ends() -> None:
    side = between_steps()
    load_id = loading(side, of_prefix("leader", 8, 8))
    side.finished("leader")
    follower = of_prefix("follower", 8, 8)
    assert side.match(follower, 0) == (None, False)
    side.reported(LoadReport({load_id: 1}))
    assert side.match(follower, 0) == (8 * BLOCK, True)


def test_a_load_that_hangs_costs_other_requests_a_bounded_wait(clock: Clock) -> None:
    side = between_steps()
    loading(side, of_prefix("leader", 8, 8))
    follower = of_prefix("follower", 8, 8)
    assert side.match(follower, 0) == (None, False)
    clock.now_s += WAIT_S_MAX / 2
    assert side.match(follower, 0) == (None, False)
    clock.now_s += WAIT_S_MAX / 2
    assert side.match(follower, 0) == (8 * BLOCK, True)


def test_a_wait_for_several_loads_in_turn_is_bounded_as_a_whole(clock: Clock) -> None:
    side = between_steps()
    follower = of_prefix("follower", 8, 8)
    for number in range(2):
        load_id = loading(side, of_prefix(f"leader{number}", 8, 8))
        assert side.match(follower, 0) == (None, False)
        side.reported(LoadReport({load_id: 1}, failed={load_id}))
        clock.now_s += WAIT_S_MAX / 2
    loading(side, of_prefix("leader2", 8, 8))
    assert side.match(follower, 0) == (8 * BLOCK, True)


def test_the_load_of_one_rank_alone_is_no_prefix_for_others() -> None:
    side = between_steps(ranks=2)
    load_id = loading(side, of_prefix("leader", 8, 8))
    follower = of_prefix("follower", 8, 8)
    side.reported(LoadReport({load_id: 1}))
    assert side.match(follower, 0) == (None, False)
    side.reported(LoadReport({load_id: 1}))
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
            shared.ended(gone)
        brought = [
            (sum(key in loaded for key in keys[begin:]), keys[begin] in loaded, end) for loaded, end in running.values()
        ]
        part, end = next(((part, end) for part, begins, end in brought if begins), (0, 0))
        is_worth = part >= max(end - begin - part, depth - begin - part)
        found = shared.worth_waiting_for(keys, begin, depth)
        assert found == (part if is_worth else 0)
        waits += bool(found)
        if not any(part for part, _, _ in brought):
            running[number] = (set(keys[begin:]), depth)
            shared.begin(number, keys, begin, depth)
    assert waits > 100
    for number in list(running):
        shared.ended(number)
    assert not shared._load_of
    assert not shared._loads
