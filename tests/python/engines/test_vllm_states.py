"""States at block boundaries (Mamba): which are stored, and how they are loaded."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import BLOCK, FakeDepot, Step, found, geometry, options, pages, request

from kvdepot.engines.vllm.scheduler import SchedulerSide

STATES, ATTENTION = 0, 1


def hybrid(depot: Any = None, **values: Any) -> SchedulerSide:
    """A scheduler of a group with states and a group with attention."""
    shape = geometry(1, 0)
    shape = replace(shape, groups=(replace(shape.groups[STATES], keeps_state=True), shape.groups[ATTENTION]))
    side = SchedulerSide(depot or FakeDepot(), options(**values), shape, 1)
    side.open_namespaces([found(0, 2)])
    return side


def output(step: Step, **boundaries: list[tuple[int, int, int]]) -> Any:
    """Returns a step in which vLLM names these states, by request: group, page and number of tokens."""
    made = step.output()
    made.kv_connector_block_state = SimpleNamespace(get_block_ids=step.tables.get, boundary_state_offloads=boundaries)
    return made


def saved(side: SchedulerSide, made: Any) -> dict[int, tuple[list[int], list[int]]]:
    """Returns pages and block indexes of a step's saves, by group."""
    return {
        group: (blocks.pages, [int(one.rsplit(b"/")[-1]) for one in blocks.hashes])
        for group, blocks in side.build_step(made).saves.items()
    }


@pytest.fixture(autouse=True)
def plain_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in the form of the requests' hashes, to recognise blocks by."""
    monkeypatch.setattr("kvdepot.engines.vllm.requests.block_keys", list)


def test_the_page_that_vllm_names_is_stored_and_not_the_block_table_s() -> None:
    """The block table has the page of the running state, which the next token changes."""
    side = hybrid()
    side.new_request(request("r", 5 * BLOCK))
    step = Step().starts("r", 0, 4 * BLOCK, [0, 0, 0, 41], [1, 2, 3, 4])
    found = saved(side, output(step, r=[(STATES, 77, 4 * BLOCK)]))
    assert found == {STATES: ([77], [3]), ATTENTION: ([1, 2, 3, 4], [0, 1, 2, 3])}


def test_without_a_name_no_state_is_stored() -> None:
    side = hybrid()
    side.new_request(request("r", 5 * BLOCK))
    assert STATES not in saved(side, output(Step().starts("r", 0, 4 * BLOCK, [0, 0, 0, 41], [1, 2, 3, 4])))


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ((STATES, 0, 2 * BLOCK), "the null page"),
        ((STATES, 77, BLOCK + 4), "a boundary within a block"),
        ((STATES, 77, 6 * BLOCK), "beyond the prompt"),
        ((ATTENTION, 77, 2 * BLOCK), "a group that keeps no state"),
        ((9, 77, 2 * BLOCK), "a group that is not stored"),
    ],
)
def test_other_boundaries_are_left_out(entry: tuple[int, int, int], why: str) -> None:
    side = hybrid()
    side.new_request(request("r", 5 * BLOCK, known=6 * BLOCK))
    step = Step().starts("r", 0, 4 * BLOCK, [0, 0, 0, 41], [1, 2, 3, 4])
    assert STATES not in saved(side, output(step, r=[entry])), why


def test_a_state_is_stored_once() -> None:
    side = hybrid()
    side.new_request(request("r", 5 * BLOCK))
    step = Step().starts("r", 0, 2 * BLOCK, [0, 41], [1, 2])
    assert STATES in saved(side, output(step, r=[(STATES, 41, 2 * BLOCK)]))
    again = Step().goes_on("r", 2 * BLOCK, 1, ([0, 41, 42], [1, 2, 3]))
    assert saved(side, output(again, r=[(STATES, 41, 2 * BLOCK)])) == {}


def test_a_request_that_asks_for_less_stores_less() -> None:
    side = hybrid()
    side.new_request(request("r", 5 * BLOCK, max_offload_tokens=2 * BLOCK))
    step = Step().starts("r", 0, 4 * BLOCK, [0, 40, 0, 41], [1, 2, 3, 4])
    found = saved(side, output(step, r=[(STATES, 40, 2 * BLOCK), (STATES, 41, 4 * BLOCK)]))
    assert found == {STATES: ([40], [1]), ATTENTION: ([1, 2], [0, 1])}


def test_a_hit_loads_the_last_state_between_steps() -> None:
    """Never in a step: after a failure vLLM cannot recompute from within a state."""
    side = hybrid(FakeDepot(units=3))
    assert not side.loads_before_forward
    asked = request("r", 4 * BLOCK)
    assert side.match(asked, 0) == (3 * BLOCK, True)
    side.allocated(asked, pages([0, 0, 43], [1, 2, 3]), 3 * BLOCK)
    (load,) = side.build_step(output(Step())).loads
    assert {group: blocks.pages for group, blocks in load.blocks.items()} == {STATES: [43], ATTENTION: [1, 2, 3]}


def test_a_state_alone_is_never_loaded_in_a_step() -> None:
    shape = geometry(1)
    alone = replace(shape, groups=(replace(shape.groups[0], keeps_state=True),))
    assert shape.recomputes_by_block
    assert not alone.recomputes_by_block
