"""KV of drafts (EAGLE, MTP): a volatile last block is not stored; a hit ends where the next block still matches."""

from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import BLOCK, FakeDepot, Step, geometry, pages, request, scheduler

from kvdepot.engines.vllm.drafts import Drafts, drafts_of
from kvdepot.engines.vllm.lookup import Bounds, HitLimits

ALL = Drafts(frozenset({0}), lookahead_tokens=1)


def config(*marks: bool, eagle: bool = True, drop: bool = True, **values: Any) -> tuple[Any, Any]:
    """An engine's configuration: the groups that vLLM has marked as a draft's."""
    speculative = SimpleNamespace(use_eagle=lambda: eagle, use_eagle_block_drop=lambda: eagle and drop)
    groups = [SimpleNamespace(is_eagle_group=mark) for mark in marks]
    return (
        SimpleNamespace(speculative_config=speculative, num_prefill_lookahead_tokens=1, **values),
        SimpleNamespace(kv_cache_groups=groups),
    )


def test_drafts_are_in_marked_groups_and_else_in_all_of_them() -> None:
    assert drafts_of(*config(False, True)).groups == {1}
    assert drafts_of(*config(False, False)).groups == {0, 1}


def test_engines_without_a_draft_have_none() -> None:
    """N-grams have no KV; and vLLM may be configured to keep such blocks."""
    assert not drafts_of(*config(False, eagle=False))
    assert not drafts_of(*config(False, drop=False))
    _, groups = config(False)
    assert not drafts_of(SimpleNamespace(speculative_config=None), groups)  # type: ignore[arg-type]
    assert not drafts_of(SimpleNamespace(), groups)  # type: ignore[arg-type]


def test_engines_before_the_switch_are_read() -> None:
    vllm, groups = config(False)
    del vllm.speculative_config.use_eagle_block_drop, vllm.num_prefill_lookahead_tokens
    assert drafts_of(vllm, groups) == Drafts(frozenset({0}), 1)


@pytest.mark.parametrize(
    ("prompt", "expected"), [(4 * BLOCK, 3), (4 * BLOCK + 1, 3), (5 * BLOCK - 1, 3), (5 * BLOCK, 4)]
)
@pytest.mark.parametrize("layerwise", [True, False])
def test_a_hit_loses_its_last_block(prompt: int, expected: int, layerwise: bool) -> None:
    """As in vLLM's own cache: the block after it has to match, too, so a complete prompt is claimed."""
    depot = FakeDepot(units=99)
    side = scheduler(depot, drafts=ALL, use_layerwise=layerwise)
    assert side.match(request("r", prompt), 0)[0] == expected * BLOCK
    assert depot.claims[0].limit == prompt // BLOCK


def test_a_single_block_is_no_hit() -> None:
    depot = FakeDepot(units=1)
    side, req = scheduler(depot, drafts=ALL), request("r", 4 * BLOCK)
    assert side.match(req, 0) == (0, False)
    assert depot.claims[0].released
    assert scheduler(FakeDepot(units=9), drafts=ALL).match(request("r", 2 * BLOCK - 1), 0) == (0, False)


def test_limits_are_those_of_the_hit_and_not_of_the_claim() -> None:
    limits = HitLimits(geometry(), leaves_token=True, hit_ratio=0.5, dropped_tokens=BLOCK)
    assert limits.bounds(request("r", 8 * BLOCK), BLOCK, None) == Bounds(1, 5, 1)
    assert limits.bounds(request("r", 8 * BLOCK), BLOCK, 2 * BLOCK) == Bounds(1, 4, 1)


def test_a_window_is_claimed_for_the_shorter_hit() -> None:
    """The hit ends a block before the claim, so its window also begins a block earlier."""
    side = scheduler(FakeDepot(units=9), windows=(0, 2), drafts=Drafts(frozenset({0}), 1))
    assert side.match(request("r", 6 * BLOCK), 0) == (5 * BLOCK, True)
    assert [group.window_blocks for group in side._namespaces.groups] == [0, 3]


def test_only_blocks_of_the_hit_are_loaded() -> None:
    depot = FakeDepot(units=4)
    side, req = scheduler(depot, drafts=ALL), request("r", 6 * BLOCK)
    tokens, _ = side.match(req, 0)
    side.allocated(req, pages([1, 2, 3, 4, 5, 6]), tokens)
    (load,) = side.build_step(Step().output()).loads
    assert load.blocks[0].pages == [1, 2, 3]


def steps(side: Any, req: Any, *ends: int) -> list[list[list[int]]]:
    """Returns the pages of every group that steps save which end at these tokens of the request."""
    side.match(req, 0)
    tables = tuple([10 * index + page for page in range(1, 7)] for index in range(len(side._geometry.groups)))
    side.allocated(req, pages(*tables), 0)
    found, begin = [], 0
    for end in ends:
        step = Step()
        if begin == 0:
            step.starts("r", 0, end, *tables)
        else:
            step.goes_on("r", begin, end - begin, tables)
        saves = side.build_step(step.output()).saves
        found.append([saves[index].pages if index in saves else [] for index in range(len(tables))])
        begin = end
    return found


def test_the_last_block_of_a_draft_waits_for_the_next_while_the_request_decodes() -> None:
    """So does the last block of a prompt that ends with it. Other groups do not wait."""
    side = scheduler(FakeDepot(), windows=(0, 0), drafts=Drafts(frozenset({1}), 1))
    req = request("r", 2 * BLOCK, known=6 * BLOCK)
    found = steps(side, req, BLOCK, 2 * BLOCK, 3 * BLOCK - 1, 3 * BLOCK, 4 * BLOCK - 1, 4 * BLOCK)
    assert found == [[[1], [11]], [[2], []], [[], []], [[3], [12]], [[], []], [[4], [13]]]


def test_nothing_is_passed_over_when_a_prefill_becomes_a_decode() -> None:
    side = scheduler(FakeDepot(), drafts=ALL)
    req = request("r", 2 * BLOCK + 3, known=6 * BLOCK)
    found = steps(side, req, 2 * BLOCK + 3, 3 * BLOCK, 4 * BLOCK, 5 * BLOCK)
    assert found == [[[1, 2]], [[]], [[3]], [[4]]]


def test_tokens_that_a_chain_of_modules_reads_again_are_not_final() -> None:
    """Each reads one token further than the one before: with four, a prefill's last three are written again."""
    side = scheduler(FakeDepot(), drafts=Drafts(frozenset({0}), lookahead_tokens=4))
    req = request("r", 4 * BLOCK)
    assert steps(side, req, 2 * BLOCK, 2 * BLOCK + 3, 4 * BLOCK - 4) == [[[1]], [[2]], [[3]]]
