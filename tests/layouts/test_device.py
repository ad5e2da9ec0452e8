"""Every case over a device: the stand-in for the CUDA driver, whose copies are delayed and in a random legal order."""

import itertools
from collections.abc import Iterator

import checks
import memory
import pytest
from cases import CASES, Case

STORED = [case for case in CASES if not case.refused]
ENGINES = ("memcpy", "batch", "kernel")
FORMS = {"layers": True, "whole blocks": False}
RUNS = [
    pytest.param(case, FORMS[form], copies, id=f"{case}-{form}-{copies}")
    for (case, form), copies in zip(itertools.product(STORED, FORMS), itertools.cycle(ENGINES), strict=False)
]
"""Whole blocks are what a GPU's engine uses by default (``use_layerwise: auto``)."""


@pytest.fixture(scope="module")
def driver() -> memory.Standin:
    if not memory.standin_is_there():
        pytest.fail("this process finds no stand-in for the CUDA driver: run make test-layouts, which builds it")
    return memory.Standin(0, seed=1)


@pytest.fixture
def device(driver: memory.Standin) -> Iterator[memory.Standin]:
    yield driver
    driver.free()
    assert driver.device.violations() == ""


@pytest.mark.parametrize(("case", "layerwise", "copies"), RUNS)
def test_bytes_come_back_over_a_device(case: Case, layerwise: bool, copies: str, device: memory.Standin) -> None:
    """Each case in both forms, each by one of the copy engines, in turn."""
    assert checks.round_trip_problem(case, layerwise, device, copies) == ""
