"""The kinds of model, numbers of ranks and ways of loading that tests run with."""

from typing import Any

import pytest
from same import KINDS

Combination = tuple[str, int, bool]
"""Kind of model, ranks, and whether loads go layer by layer."""

COMBINATIONS = [(kind, ranks, layerwise) for kind in KINDS for ranks in (1, 2) for layerwise in (True, False)]


def combinations(*in_ci: Combination, kinds: tuple[str, ...] = KINDS) -> list[Any]:
    """All combinations; those not in ``in_ci`` run with ``--full`` only."""
    assert set(in_ci) <= set(COMBINATIONS)
    return [
        pytest.param(*one, marks=() if one in in_ci else pytest.mark.full, id=title(*one))
        for one in COMBINATIONS
        if one[0] in kinds
    ]


def title(kind: str, ranks: int, layerwise: bool) -> str:
    """Returns the combination's part of a test's name: ``llama-2-layerwise``."""
    return f"{kind}-{ranks}-{'layerwise' if layerwise else 'whole'}"
