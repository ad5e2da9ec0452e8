"""The blocks that a hit requires are those that vLLM's own managers keep."""

from typing import Any

import pytest
from cache_lab import Engine, build
from cases import CASES, GEMMA, GPT_OSS, LLAMA4, Case
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec

from kvdepot.engines.vllm.groups import Geometry, Group

STORED = [case for case in CASES if not case.refused]
HITS = 3000
"""Number of ends of hits to check, ``hit_tokens`` apart."""


def kept_blocks(manager: Any, end: int) -> int:
    """Returns blocks before ``end`` that vLLM allocates for a hit ending there; earlier ones are its null block."""
    return end // manager.block_size - min(manager.get_num_skipped_tokens(end), end) // manager.block_size


def manager_of(engine: Engine, group: Group, found: Geometry) -> Any:
    return get_manager_for_kv_cache_spec(
        engine.scheduler_config.kv_cache_groups[group.index].kv_cache_spec,
        max_in_flight_tokens=1024,
        max_model_len=HITS * found.hit_tokens,
        block_pool=BlockPool(engine.case.blocks, enable_caching=True, hash_block_size=found.hash_tokens),
        enable_caching=True,
        kv_cache_group_id=group.index,
        scheduler_block_size=found.hit_tokens,
        dcp_world_size=engine.case.dcp,
    )


@pytest.mark.parametrize("case", STORED, ids=str)
def test_windows_are_those_of_vllms_managers(case: Case) -> None:
    """No block that vLLM reads is missing at any end of a hit, and some hit needs as many as the connector requests."""
    engine = build(case)
    found = engine.geometry(engine.scheduler_config)
    for group in found.groups:
        manager = manager_of(engine, group, found)
        assert manager.block_size == group.block_tokens
        ends = range(found.hit_tokens, HITS * found.hit_tokens, found.hit_tokens)
        needed = [kept_blocks(manager, end) for end in ends]
        if not group.window_blocks:
            assert needed == [end // group.block_tokens for end in ends]
            continue
        assert max(needed) == group.window_blocks


@pytest.mark.parametrize(
    ("case", "windows"),
    [
        (Case(GEMMA, "FLASH_ATTN"), {0, 64}),
        (Case(GPT_OSS, "FLASH_ATTN"), {0, 8}),
        (Case(LLAMA4, "FLASH_ATTN"), {0, 511}),
        (Case(LLAMA4, "FLASH_ATTN", None, 128), {0, 63}),
        (Case(GEMMA, "FLASH_ATTN", hybrid=False), {0}),
        (Case(LLAMA4, "FLASH_ATTN", hybrid=False), {0}),
    ],
    ids=str,
)
def test_windows_in_blocks(case: Case, windows: set[int]) -> None:
    engine = build(case)
    assert {group.window_blocks for group in engine.geometry(engine.scheduler_config).groups} == windows
