"""The connector's counts, over steps and ranks, and their series in Prometheus."""

from typing import Any

import pytest
from engine_parts import BLOCK, FakeDepot, geometry, pages, request, scheduler

from kvdepot.engines.vllm.drafts import Drafts
from kvdepot.engines.vllm.measures import MEASURES, SECONDS_BUCKETS, Kind, Over
from kvdepot.engines.vllm.meta import Blocks
from kvdepot.engines.vllm.saveplan import SavePlan
from kvdepot.engines.vllm.stats import DepotStats, stats_from


def rank(number: int) -> DepotStats:
    """One of several ranks that have loaded the same blocks, each its slice, and waited as long."""
    stats = DepotStats(first_rank=number == 0)
    stats.add("loads")
    stats.add("load_blocks", 4)
    stats.add("load_bytes", 1000)
    stats.add_failures("load", {"timeout": number})
    stats.observe("load_seconds", 0.25)
    return stats


def taken(stats: DepotStats) -> DepotStats:
    """Returns it as it arrives from another process."""
    found = stats.take()
    assert found is not None
    return stats_from(found.data)


def test_ranks_add_their_bytes_and_do_not_repeat_each_other() -> None:
    together = taken(rank(0)).aggregate(taken(rank(1))).aggregate(taken(rank(2)))
    assert together.data == {
        "loads": 1,
        "load_blocks": 4,
        "load_bytes": 3000,
        "load_failed_blocks": {"timeout": 3},
        "load_seconds": [0.25],
    }


def test_ranks_that_share_a_slice_s_dumps_add_them_up_and_other_slices_do_not_repeat_them() -> None:
    together = DepotStats(data={})
    for number in range(4):
        stats = DepotStats(first_rank=number == 0, first_slice=number < 2)
        stats.add("dump_blocks", 3 + number)
        stats.add("dump_bytes", 100)
        together = together.aggregate(taken(stats))
    assert together.data == {"dump_blocks": 7, "dump_bytes": 400}


def test_steps_add_up_and_are_counted_once() -> None:
    stats = DepotStats()
    stats.add("claims", 2)
    stats.add_hit(48, from_tier=16)
    stats.tell("attached", 1)
    first = taken(stats)
    assert stats.is_empty()
    assert stats.take() is None
    stats.add("claims")
    stats.add_hit(16, from_tier=16)
    stats.tell("attached", 0)
    together = first.aggregate(taken(stats))
    assert together.data == {"claims": 3, "hit_tokens": {"pool": 32, "tier": 32}, "attached": 0}


def test_the_log_line_has_words_and_no_lists() -> None:
    stats = rank(0)
    stats.observe("load_seconds", 0.75)
    stats.add_failures("load", {"timeout": 3})
    assert stats.reduce() == {
        "loads": 1,
        "load blocks": 4,
        "load bytes": 1000,
        "load failed blocks timeout": 3,
        "load seconds mean": 0.5,
        "load seconds max": 0.75,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        lambda stats: stats.add("load_failed_timeout"),
        lambda stats: stats.observe("loads", 1.0),
        lambda stats: stats.tell("loads", 1),
    ],
)
def test_what_has_no_measure_cannot_be_counted(wrong: Any) -> None:
    with pytest.raises(KeyError):
        wrong(DepotStats())


def test_every_measure_has_its_unit_in_its_name_and_a_sentence() -> None:
    for name, measure in MEASURES.items():
        unit = name.rpartition("_")[2]
        assert unit in {
            "tokens",
            "blocks",
            "bytes",
            "seconds",
            "claims",
            "loads",
            "fences",
            "misses",
            "unknown",
            "malformed",
            "attached",
            "requests",
            "calls",
            "ratio",
            "second",
        }, name
        assert measure.text.endswith("."), name
        of_seconds = measure.buckets is SECONDS_BUCKETS
        assert (measure.kind is Kind.HISTOGRAM and of_seconds) == (unit == "seconds"), name
        assert list(measure.buckets) == sorted(set(measure.buckets)), name
        assert measure.over is not Over.SUM or unit in {"bytes", "blocks", "second"}, name


def test_a_lookup_is_counted_once_however_often_its_request_is_matched() -> None:
    side, req = scheduler(FakeDepot(units=2)), request("r", 4 * BLOCK)
    for _ in range(3):
        assert side.match(req, 0) == (2 * BLOCK, False)
    side.allocated(req, pages([1, 2, 3, 4]), 2 * BLOCK)
    data = taken(side.stats).data
    assert len(data.pop("lookup_seconds")) == 1
    assert data.pop("lookup_hit_ratio") == [2 / 3]
    assert data == {"claims": 1, "asked_tokens": 3 * BLOCK, "hit_tokens": {"pool": 2 * BLOCK}}


def test_blocks_that_are_not_handed_over_are_counted_by_reason() -> None:
    stats = DepotStats()
    plan = SavePlan(geometry(), 0, Drafts(), stats)
    plan.hold({0: Blocks([b"a", b"b", b"c"], [1, 2, 3])}, {7})
    plan.overwritten({2, 9})
    plan.load_failed(8)
    plan.load_failed(7)
    plan.hold({0: Blocks([b"d"], [4])}, {9})
    plan.clear()
    plan.clear()
    assert stats.data == {"dropped_blocks": {"overwritten": 1, "load_failed": 2, "turned_off": 1}}


def test_what_another_version_counts_is_left_out() -> None:
    foreign = {
        "claims": 2,
        "hit_tokens": 7,
        "load_seconds": 1.5,
        "of_tomorrow": 3,
        "attached": [1],
        "misses": {"late": 1},
    }
    stats = stats_from(foreign)
    assert stats.data == {"claims": 2, "misses": {"late": 1}}
    twice = stats.aggregate(DepotStats(data=foreign)).aggregate(DepotStats(data=foreign))
    assert twice.data == {"claims": 6, "misses": {"late": 3}}


def test_a_transfer_that_has_ended_is_counted_with_its_speed() -> None:
    stats = DepotStats()
    stats.add_transfer("load", 3, 1000, 0.5)
    stats.add_transfer("load", 0, 1000, 0.25)
    assert stats.data == {
        "load_seconds": [0.5, 0.25],
        "load_blocks": 3,
        "load_bytes": 3000,
        "load_size_blocks": [3],
        "load_bytes_per_second": [6000.0],
    }
