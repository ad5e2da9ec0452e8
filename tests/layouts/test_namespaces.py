"""Engines find each other's blocks if and only if the bytes are the same."""

from dataclasses import replace

import checks
import pytest
from cache_lab import build
from cases import ALL_LAYOUTS, GEMMA, GPT_OSS, LLAMA, V3, V32, Case

from kvdepot._native import namespace_id
from kvdepot.engines.vllm.ranks import Rank

FLASH, MLA = "FLASH_ATTN", "FLASHMLA"
BASE = Case(LLAMA, FLASH, "LBNHC")


def ids(case: Case, layerwise: bool = True, rank: Rank = checks.ONE_RANK) -> list[str]:
    """Returns the namespaces of all groups and stages."""
    engine = build(case)
    found = []
    for worker in engine.workers:
        for group in checks.groups_of(engine, worker):
            pages = worker.pages(group.layer_names, layerwise)
            facts = checks.facts_of(engine, worker, group, pages, rank)
            found.append(namespace_id(facts, pages.layout.to_json()))
    return found


@pytest.mark.parametrize("case", [BASE, Case(GEMMA, FLASH), Case(V32, "FLASHMLA_SPARSE", None, 64)], ids=str)
@pytest.mark.parametrize("layerwise", [True, False], ids=["layers", "blocks"])
def test_the_same_engine_has_the_same_namespaces(case: Case, layerwise: bool) -> None:
    found = ids(case, layerwise)
    assert found == ids(case, layerwise)
    assert len(set(found)) == len(found)


def test_whatever_changes_the_bytes_changes_the_namespace() -> None:
    cases = [replace(BASE, layout=layout) for layout in ALL_LAYOUTS]
    cases += [
        replace(BASE, backend="TRITON_ATTN"),
        replace(BASE, block=32),
        replace(BASE, tp=2),
        replace(BASE, pp=2),
        replace(BASE, cache_dtype="fp8"),
        replace(BASE, backend="TRITON_ATTN", cache_dtype="fp8"),
        replace(BASE, backend="TRITON_ATTN", cache_dtype="fp8_per_token_head"),
        replace(BASE, backend="TRITON_ATTN", cache_dtype="int8_per_token_head"),
        Case(GPT_OSS, FLASH, "LBNHC"),
        Case(V3, MLA, None, 64),
        Case(V3, MLA, None, 128),
        Case(V3, MLA, None, 64, cache_dtype="fp8"),
    ]
    found = [one for case in cases for one in ids(case)]
    assert len(set(found)) == len(found)


def test_ranks_with_other_slices_have_other_namespaces() -> None:
    ranks = [Rank(2, 0, 0), Rank(2, 1, 0), Rank(1, 0, 1), checks.ONE_RANK]
    assert len({one for rank in ranks for one in ids(BASE, rank=rank)}) == len(ranks)


def test_layer_by_layer_and_whole_blocks_differ_where_the_order_of_bytes_does() -> None:
    """If the layers of a block lie in another order than the group lists them, that order is a fact."""
    case = Case(V32, "FLASHMLA_SPARSE", "BLHNC", 64)
    engine = build(case)
    worker = engine.workers[0]
    (group,) = checks.groups_of(engine, worker)
    forms = worker.pages(group.layer_names, layerwise=False).forms
    assert any(form.startswith("order:") for form in forms)
    assert not any(form.startswith("order:") for form in worker.pages(group.layer_names).forms)
