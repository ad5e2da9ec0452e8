"""Real vLLM with several numbers of tensor-parallel ranks on one store: blocks computed by some are loaded by
others."""

from typing import Any

import pytest
from engine_lab import EngineRun, Lab
from test_vllm import RESET, generate, hits

LAYERWISE = [True, False]
IN_SHORT = [("llama", 2, 1, True), ("llama", 1, 2, False)]
"""Models, ranks of the first and of the second engine, and layer-wise copies that run without ``--full``."""


def run(lab: Lab, model: str, ranks: int, layerwise: bool, *phases: dict[str, Any], slices: int = 2) -> EngineRun:
    options = {"use_layerwise": layerwise, "kv_head_slices": slices}
    return lab.run(model, list(phases), tp=ranks, options=options)


@pytest.mark.parametrize(
    ("model", "before", "after", "layerwise"),
    [
        pytest.param(model, *ranks, layerwise, marks=[] if (model, *ranks, layerwise) in IN_SHORT else pytest.mark.full)
        for model in ("llama", "gemma3")
        for ranks in ((2, 1), (1, 2))
        for layerwise in LAYERWISE
    ],
)
def test_an_engine_of_another_size_finds_the_blocks_and_gives_the_same_tokens(
    lab: Lab, model: str, before: int, after: int, layerwise: bool
) -> None:
    """The first engine also finds what the other adds."""
    longer = [[[1, 600], [7, 90]], [[2, 350], [8, 10]]]
    first = run(lab, model, before, layerwise, generate("cold"), generate("own cache"), RESET, generate("warm"))
    assert first["cold"]["cached"] == [0, 0, 0]
    assert first["warm"]["tokens"] == first["cold"]["tokens"]
    assert first["warm"]["cached"] == hits(layerwise, model)
    other = run(lab, model, after, layerwise, generate("warm"), RESET, generate("longer", longer))
    assert other["warm"]["cached"] == hits(layerwise, model)
    assert other["warm"]["tokens"] == first["cold"]["tokens"]
    assert other["longer"]["cached"][0] >= 576
    again = run(lab, model, before, layerwise, generate("longer", longer))
    assert again["longer"]["cached"][0] > 600, "what the other engine has added"
    assert again["longer"]["tokens"] == other["longer"]["tokens"]


@pytest.mark.parametrize("layerwise", [True, pytest.param(False, marks=pytest.mark.full)], ids=["layerwise", "whole"])
def test_one_head_on_two_ranks_is_stored_once_by_both(lab: Lab, layerwise: bool) -> None:
    model = "llama-one_kv_head"
    two = run(lab, model, 2, layerwise, generate("cold"), generate("own cache"), RESET, generate("warm"))
    assert two["warm"]["cached"] == hits(layerwise, model)
    assert two["warm"]["tokens"] == two["cold"]["tokens"]
    assert "one of 2 ranks that share its dumps" in two.log
    one = run(lab, model, 1, layerwise, generate("warm"))
    assert one["warm"]["cached"] == hits(layerwise, model)
    assert one["warm"]["tokens"] == two["cold"]["tokens"]


def test_engines_that_do_not_ask_for_it_keep_to_their_number_of_ranks(lab: Lab) -> None:
    two = run(lab, "llama", 2, True, generate("cold"), slices=0)
    one = run(lab, "llama", 1, True, generate("cold"), slices=0)
    assert one["cold"]["cached"] == [0, 0, 0]
    assert one["cold"]["tokens"] == two["cold"]["tokens"], "otherwise the tests above would show nothing"


def test_slices_that_ranks_cannot_share_out_are_said_and_blocks_are_stored_by_rank(lab: Lab) -> None:
    found = run(lab, "llama", 2, True, generate("cold"), generate("own cache"), RESET, generate("warm"), slices=1)
    assert "1 slices cannot be distributed over 2 ranks: use a multiple of 2" in found.log
    assert found["warm"]["cached"] == hits(True, "llama")
    assert found["warm"]["tokens"] == found["cold"]["tokens"]


def test_a_failed_load_of_a_slice_is_computed(fake_lab: Lab) -> None:
    """One rank, two slices: every seventh read fails, of either (P2); no garbage is stored (P1)."""
    model, options = "llama", {"use_layerwise": True, "kv_head_slices": 2}
    trouble = {"do": "control", "fail_load_every": 7}
    found = fake_lab.run(
        model,
        [generate("cold"), RESET, trouble, generate("failing"), RESET, {"do": "control"}, generate("after")],
        options=options,
    )
    assert "blocks failed to load" in found.log
    assert found["failing"]["tokens"] == found["after"]["tokens"] == found["cold"]["tokens"]
    assert found["after"]["cached"] == hits(True, model)
