"""Every model family, attention backend and layout of vLLM: groups, copies, bytes, and what the self-test finds."""

import checks
import pytest
from cache_lab import build
from cases import ALL_LAYOUTS, CASES, COMPACT, LLAMA, Case

STORED = [case for case in CASES if not case.refused]
REFUSED = [case for case in CASES if case.refused]


@pytest.mark.parametrize("case", STORED, ids=str)
def test_scheduler_and_workers_read_the_same_groups(case: Case) -> None:
    engine = build(case)
    scheduler = engine.geometry(engine.scheduler_config)
    assert not scheduler.unsupported
    for worker in engine.workers:
        found = engine.geometry(worker.config)
        assert (found.hash_tokens, found.hit_tokens) == (scheduler.hash_tokens, scheduler.hit_tokens)
        by_group = [(group.index, group.block_tokens, group.window_blocks) for group in found.groups]
        assert by_group == [(group.index, group.block_tokens, group.window_blocks) for group in scheduler.groups]


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_cannot_be_stored_is_refused_with_a_reason(case: Case) -> None:
    """The engine runs without it: nothing is raised."""
    engine = build(case)
    for config in (engine.scheduler_config, *(worker.config for worker in engine.workers)):
        found = engine.geometry(config)
        assert case.refused in found.unsupported
        assert not found.groups


@pytest.mark.parametrize("case", STORED, ids=str)
def test_a_page_that_is_contiguous_is_one_copy(case: Case) -> None:
    engine = build(case)
    for worker in engine.workers:
        for group in checks.groups_of(engine, worker):
            _, now, block = checks.copies_of(engine, worker, group)
            if engine.layout.is_block_compact:
                assert now == 1
                assert block == checks.contiguous_pieces(worker, group)
            else:
                assert now == checks.heads_of(group)


def test_all_layouts_are_in_the_table() -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert set(ALL_LAYOUTS) == {layout.name for layout in KVCacheLayout}
    assert set(COMPACT) == {layout.name for layout in KVCacheLayout if layout.is_block_compact}


def test_vllms_own_choice_took_hundreds_of_copies_by_the_rule_before() -> None:
    """The basis of the documentation's comparison."""
    found = checks.row(Case(LLAMA, "FLASH_ATTN", "LBNHC", 128))
    assert (found.before, found.now) == (1024, 1)


@pytest.mark.parametrize("case", STORED, ids=str)
def test_the_bytes_of_whole_blocks_are_those_that_vllm_itself_would_copy(case: Case) -> None:
    """In host memory; `test_device` does the same in device memory, also layer by layer."""
    assert checks.round_trip_problem(case, layerwise=False) == ""


@pytest.mark.parametrize("case", STORED, ids=str)
def test_the_self_test_finds_wrong_page_arithmetic(case: Case) -> None:
    found = checks.row(case)
    assert found.mistakes
    assert found.missed == ()
