"""Loads of the real core that fail after their claim, on one rank or on all: recomputed, and nothing is poisoned."""

import pytest
from combinations import COMBINATIONS, combinations, title
from engine_lab import Lab
from same import EXACT, assert_likely, engine_of
from test_vllm import RESET, generate

THREE = [[[1, 600]], [[2, 350]], [[3, 330]]]
LONGER = [[[1, 600], [7, 90]], [[2, 350], [8, 40]]]
# The rank whose loads fail; None = every rank's.
FAILING = {(1, True): [None], (1, False): [None], (2, True): [None, 1], (2, False): [None, 0]}
CASES = [(*one, rank) for one in COMBINATIONS for rank in FAILING[one[1:]]]
IN_CI = (("llama", 2, True, 1), ("gemma3", 1, True, None))


@pytest.mark.parametrize(
    ("kind", "ranks", "layerwise", "rank"),
    [
        pytest.param(*one, marks=() if one in IN_CI else pytest.mark.full, id=f"{title(*one[:3])}-fails on {one[3]}")
        for one in CASES
    ],
)
def test_blocks_that_are_gone_at_the_load(
    real_lab: Lab, kind: str, ranks: int, layerwise: bool, rank: int | None
) -> None:
    """Every seventh block is lost between claim and load (P2); blocks stored meanwhile are correct (P1)."""
    sabotage = {"do": "control", "fail_load_every": 7, **({"rank": rank} if rank is not None else {})}
    run = real_lab.run(
        kind,
        [
            generate("cold", THREE),
            RESET,
            generate("computed", LONGER),
            {"do": "reset_all"},
            generate("cold again", THREE),
            RESET,
            sabotage,
            generate("failing", THREE),
            RESET,
            generate("failing longer", LONGER),
            {"do": "control"},
            RESET,
            generate("after", THREE),
            RESET,
            generate("after longer", LONGER),
        ],
        tp=ranks,
        options={"use_layerwise": layerwise, "on_reset": "drop"},
        engine=engine_of(kind),
    )
    assert "blocks failed to load; vLLM recomputes them" in run.log
    assert run["failing"]["finish"] == ["length"] * 3
    assert run["after longer"]["cached"][0] > 600
    if kind in EXACT:
        for name in ("cold again", "failing", "after"):
            assert run[name]["tokens"] == run["cold"]["tokens"], name
        for name in ("failing longer", "after longer"):
            assert run[name]["tokens"] == run["computed"]["tokens"], name
    else:
        assert_likely(real_lab, kind, THREE, *(run[name]["tokens"] for name in ("cold", "failing", "after")))
        longer = (run[name]["tokens"] for name in ("computed", "failing longer", "after longer"))
        assert_likely(real_lab, kind, LONGER, *longer)


@pytest.mark.parametrize(("kind", "ranks", "layerwise"), combinations(("llama", 1, True)))
def test_depot_that_dies_between_claim_and_load(real_lab: Lab, kind: str, ranks: int, layerwise: bool) -> None:
    """kill -9 when the scheduler has its hit and the last worker is about to load it."""
    kill = {"do": "control", "kill_depot_at_load": 1, "rank": ranks - 1, "socket": real_lab.socket}
    settle = {"do": "settle", "socket": real_lab.socket}
    run = real_lab.run(
        kind,
        [
            generate("cold", THREE),
            settle,
            RESET,
            kill,
            generate("killed", THREE),
            {"do": "control"},
            {"do": "attached"},
            settle,
            RESET,
            generate("back", THREE),
        ],
        tp=ranks,
        options={"use_layerwise": layerwise},
        engine=engine_of(kind),
    )
    assert "blocks failed to load; vLLM recomputes them" in run.log
    assert run["killed"]["finish"] == ["length"] * 3
    assert run["back"]["cached"][0] == 576
    if kind in EXACT:
        assert run["killed"]["tokens"] == run["back"]["tokens"] == run["cold"]["tokens"]
    else:
        assert_likely(real_lab, kind, THREE, *(run[name]["tokens"] for name in ("cold", "killed", "back")))
