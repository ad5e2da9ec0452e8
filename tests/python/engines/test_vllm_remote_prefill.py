"""Requests whose prompt another engine has computed, and another connector of this engine loads."""

from typing import Any

import pytest
from engine_parts import BLOCK, FakeDepot, Step, found, geometry, options, pages, request, scheduler

from kvdepot.engines.vllm.asks import is_prefilled_remotely
from kvdepot.engines.vllm.meta import LoadReport
from kvdepot.engines.vllm.scheduler import SchedulerSide

PAGES = [1, 2, 3, 4]


def prefilled(name: str = "r") -> Any:
    return request(name, 4 * BLOCK, do_remote_prefill=True, remote_engine_id="prefill")


def test_the_other_connectors_say_whether_a_prompt_is_still_to_come() -> None:
    assert is_prefilled_remotely({"do_remote_prefill": True})
    for params in (None, {}, [], "do_remote_prefill", {"do_remote_prefill": False}, {"do_remote_decode": True}):
        assert not is_prefilled_remotely(params)


def test_it_is_admitted_at_once_without_a_claim() -> None:
    """`MultiConnector` would wait for our answer, and then let the other connector load everything anyway (P9)."""
    depot = FakeDepot(units=9, settled=False)
    side, req = scheduler(depot, has_siblings=True), prefilled()
    assert side.match(req, 0) == (0, False)
    assert depot.claims == []
    side.allocated(req, pages(PAGES), 0)
    assert side.build_step(Step().output()).fresh_pages == PAGES
    assert side.stats.data["misses"] == {"remote": 1}
    assert "claims" not in side.stats.data


def test_it_does_not_wait_for_another_request_s_load() -> None:
    side = scheduler(FakeDepot(units=4), use_layerwise=False, has_siblings=True)
    first, second = request("first", 4 * BLOCK), prefilled("second")
    second.block_hashes = first.block_hashes
    tokens, _ = side.match(first, 0)
    assert tokens
    side.allocated(first, pages(PAGES), tokens)
    assert side.match(second, 0) == (0, False)


@pytest.mark.parametrize("loads", [True, False])
def test_it_does_not_wait_for_the_ranks_or_the_weights(loads: bool) -> None:
    """Its own step brings their reports."""
    side = SchedulerSide(
        FakeDepot(),  # type: ignore[arg-type]
        options(),
        geometry(),
        1,
        loads=loads,
        has_siblings=True,
    )
    assert side.match(request("other", 4 * BLOCK), 0) == (None, False)
    assert side.match(prefilled(), 0) == (0, False)
    side.allocated(prefilled(), pages(PAGES), 0)
    assert side.stats.data["misses"] == {"remote": 1}
    side.open_namespaces([found(0)])
    side.reset()
    assert side.match(prefilled(), 0) == (0, False)


def test_what_the_other_connector_loads_is_stored() -> None:
    side, req = scheduler(FakeDepot(), has_siblings=True), prefilled()
    side.match(req, 0)
    side.allocated(req, pages(PAGES), 0)
    step = side.build_step(Step().starts("r", 4 * BLOCK - 1, 1, PAGES).output())
    side.reported(LoadReport({step.witness: 1}))
    assert side.build_step(Step().output()).late_saves[0].pages == PAGES


def test_it_is_looked_up_once_the_other_connector_has_begun_or_given_up() -> None:
    """A preempted request, or one whose transfer failed, would otherwise be computed although the depot has it."""
    depot = FakeDepot(units=9)
    side, req = scheduler(depot, has_siblings=True), prefilled()
    assert side.match(req, 0) == (0, False)
    req.kv_transfer_params["do_remote_prefill"] = False
    assert side.match(req, 0) == (3 * BLOCK, False)


def test_without_another_connector_it_is_looked_up() -> None:
    """Nobody else would load it."""
    side = scheduler(FakeDepot(units=9))
    assert side.match(prefilled(), 0) == (3 * BLOCK, False)
