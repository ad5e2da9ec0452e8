"""How long a scheduler of several ranks stands still for tiers: SGLang takes the shortest hit of all ranks."""

import pytest

from kvdepot.engines.sglang.patience import FREE_S, PART, Patience

WAIT_S = 1.0
OTHER_S = 0.1
"""Seconds of other work between two lookups."""


def blocked_part(needs_s: list[float], *, seconds: float = 100.0) -> tuple[float, int]:
    """Returns the part of the time in which ranks waited for tiers in vain, and the number of common hits.

    Each lookup has a request of its own, and takes as long as the slowest rank. Rank ``r`` has its pages after
    ``needs_s[r]``.
    """
    ranks = [Patience(WAIT_S, is_limited=True, is_alone=len(needs_s) == 1) for _ in needs_s]
    began_s = now_s = 1000.0
    vain_s, hits = 0.0, 0
    while now_s < began_s + seconds:
        limits = [rank.limit(now_s, is_repeated=False) for rank in ranks]
        took = [min(limit, need) for limit, need in zip(limits, needs_s, strict=True)]
        spent = [rank.waited(limit, now_s, now_s + one) for rank, limit, one in zip(ranks, limits, took, strict=True)]
        is_common = all(limit > need for limit, need in zip(limits, needs_s, strict=True))
        if is_common:
            hits += 1
            for rank, waited_s in zip(ranks, spent, strict=True):
                rank.loaded(waited_s)
        else:
            vain_s += max(took)
        now_s += max(took) + OTHER_S
    return vain_s / (now_s - began_s), hits


@pytest.mark.parametrize(
    ("needs_s", "at_most"),
    [
        ([1.2], 0.101),
        ([1.2, 1.2], 0.101),
        # One rank has its pages in time, and would wait for every request.
        ([0.9, 1.2], 0.12),
        ([0.3, 1.2], 0.17),
        ([0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.2], 0.3),
    ],
)
def test_waits_in_vain_take_a_small_part_of_the_time(needs_s: list[float], at_most: float) -> None:
    part, hits = blocked_part(needs_s)
    assert hits == 0
    assert 0.09 < part <= at_most


@pytest.mark.parametrize("needs_s", [[0.5], [0.5, 0.5], [0.2, 0.9]])
def test_waits_that_bring_a_hit_of_all_ranks_are_not_limited(needs_s: list[float]) -> None:
    part, hits = blocked_part(needs_s)
    assert part == 0
    assert hits > 90


def test_a_lookup_that_waits_for_no_tier_costs_nothing() -> None:
    patience = Patience(WAIT_S, is_limited=True, is_alone=False)
    for _ in range(1000):
        assert patience.waited(patience.limit(5.0, is_repeated=True), 5.0, 5.0 + FREE_S / 2) == 0
    assert patience.limit(5.0, is_repeated=False) == WAIT_S


def test_the_next_period_begins_for_all_ranks_at_once() -> None:
    ranks = [Patience(WAIT_S, is_limited=True, is_alone=False) for _ in range(2)]
    for rank, waited_s in zip(ranks, (0.7, 1.0), strict=True):
        rank.waited(rank.limit(3.0, is_repeated=False), 3.0, 3.0 + waited_s)
    end_s = PART * WAIT_S
    assert [rank.limit(end_s - 0.1, is_repeated=False) for rank in ranks] == [pytest.approx(0.3), 0.0]
    assert [rank.limit(end_s, is_repeated=False) for rank in ranks] == [WAIT_S, WAIT_S]
