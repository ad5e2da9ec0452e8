"""Ranks with equal bytes share a namespace and its dumps; other ranks do not."""

from types import SimpleNamespace
from typing import Any

import pytest
from cache_lab import build
from cases import LLAMA, V3, V32, Case
from vllm.distributed import parallel_state

from kvdepot.engines.vllm.ranks import Rank, this_rank
from kvdepot.engines.vllm.shares import ALONE

FLASH, MLA, SPARSE = "FLASH_ATTN", "FLASHMLA", "FLASHMLA_SPARSE"
CASES = [
    Case(LLAMA, FLASH),
    Case(LLAMA, FLASH, tp=2),
    Case(LLAMA, FLASH, tp=8),
    Case(LLAMA, FLASH, tp=16),
    Case(LLAMA, FLASH, tp=16, dcp=2),
    Case(V3, MLA, block=64, tp=8),
    Case(V3, MLA, block=64, tp=8, dcp=2),
    Case(V3, MLA, block=64, tp=8, dcp=4),
    Case(V3, MLA, block=64, tp=8, dcp=8),
    Case(V32, SPARSE, block=64, tp=4),
    Case(V32, SPARSE, block=64, tp=4, dcp=2),
]


def ranks(case: Case, monkeypatch: pytest.MonkeyPatch, config: Any = None) -> list[Rank]:
    """Returns the position of each tensor-parallel rank. vLLM forms groups from consecutive ranks."""
    engine = build(case)
    found = []
    for rank in range(case.tp):
        monkeypatch.setattr(parallel_state, "get_tp_group", lambda rank=rank: SimpleNamespace(rank_in_group=rank))
        in_group = rank % case.dcp
        monkeypatch.setattr(
            parallel_state, "get_dcp_group", lambda place=in_group: SimpleNamespace(rank_in_group=place)
        )
        found.append(this_rank(engine.vllm_config, config or engine.workers[0].config))
    return found


def bytes_of(case: Case, rank: int) -> tuple[object, ...]:
    """Returns the content of a rank's blocks, beyond the common tokens: heads, and the tokens of its DCP rank."""
    latent = case.family in (V3, V32)
    heads = 0 if latent else rank * 8 // case.tp
    return heads, 0 if latent else 8 / case.tp, rank % case.dcp


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_finds_its_own_bytes_and_ranks_with_the_same_share_their_dumps(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ranks(case, monkeypatch)
    places = [(rank.kv_shards, rank.kv_shard, rank.dcp_rank) for rank in found]
    for one, place in enumerate(places):
        same = [other for other in range(case.tp) if places[other] == place]
        assert {bytes_of(case, other) for other in same} == {bytes_of(case, one)}
        assert sorted(found[other].share.index for other in same) == list(range(len(same)))
        assert {found[other].share.count for other in same} == {len(same)}


@pytest.mark.parametrize("case", [case for case in CASES if case.family in (V3, V32)], ids=str)
def test_latent_kv_is_stored_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With decode context parallelism, once for each position in a group, whatever the number of ranks."""
    found = ranks(case, monkeypatch)
    assert {rank.share.count for rank in found} == {case.tp // case.dcp}
    assert {(rank.kv_shards, rank.kv_shard) for rank in found} == {(1, 0)}


def test_a_vllm_that_does_not_say_who_holds_the_same_has_all_ranks_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then too much is stored, but nothing is missing."""
    case = Case(V3, MLA, block=64, tp=4)
    silent = SimpleNamespace(kv_cache_groups=build(case).workers[0].config.kv_cache_groups)
    found = ranks(case, monkeypatch, silent)
    assert [(rank.kv_shard, rank.share) for rank in found] == [(number, ALONE) for number in range(4)]
