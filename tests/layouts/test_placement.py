"""The self-test does not trust the tensors either: they have to be where vLLM's cache configuration places them."""

from dataclasses import replace

import pytest
import torch
from cache_lab import Worker, build
from cases import GEMMA, LLAMA, V32, Case

from kvdepot.engines.vllm.placement import PlacementError, blocks_of

CASES = [
    Case(LLAMA, "FLASH_ATTN", "LBNHC"),
    Case(LLAMA, "FLASH_ATTN", "BLHNC"),
    Case(LLAMA, "FLASH_ATTN", "BHLNC"),
    Case(LLAMA, "FLASHINFER", "LBNHC", 128),
    Case(GEMMA, "FLASH_ATTN"),
    Case(V32, "FLASHMLA_SPARSE", "BLHNC", 64),
]


def found(worker: Worker, **views: torch.Tensor) -> list[torch.Tensor]:
    """Returns the blocks of the first group, some of whose layers have other tensors."""
    names = worker.config.kv_cache_groups[0].layer_names
    changed = dict(zip(names, views.values(), strict=False))
    return blocks_of(names, {**worker.views, **changed}, worker.config, 0)


def first_two(worker: Worker) -> tuple[torch.Tensor, torch.Tensor]:
    names = worker.config.kv_cache_groups[0].layer_names
    return worker.views[names[0]], worker.views[names[1]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_are_bytes_by_block(case: Case) -> None:
    (worker,) = build(case).workers
    for blocks in found(worker):
        assert blocks.shape[0] == worker.config.num_blocks
        assert blocks.dtype == torch.uint8


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer_that_is_not_at_its_place_is_found(case: Case) -> None:
    (worker,) = build(case).workers
    one, other = first_two(worker)
    with pytest.raises(PlacementError):
        found(worker, a=other, b=one)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_view_with_its_dimensions_in_another_order_is_found(case: Case) -> None:
    (worker,) = build(case).workers
    one, other = first_two(worker)
    with pytest.raises(PlacementError):
        found(worker, a=one.transpose(0, 2), b=other)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_view_without_the_last_bytes_of_its_blocks_is_found(case: Case) -> None:
    (worker,) = build(case).workers
    one, other = first_two(worker)
    with pytest.raises(PlacementError, match="bytes"):
        found(worker, a=one[..., :-4], b=other)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_another_number_of_blocks_is_found(case: Case) -> None:
    (worker,) = build(case).workers
    halved = replace(worker.config, num_blocks=worker.config.num_blocks // 2)
    names = halved.kv_cache_groups[0].layer_names
    with pytest.raises(PlacementError):
        blocks_of(names, worker.views, halved, 0)
