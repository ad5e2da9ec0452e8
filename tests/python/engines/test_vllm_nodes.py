"""Engines whose ranks run on several nodes: the scheduler's depot has the blocks of its own node's ranks only."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import BLOCK, FakeDepot, found, geometry, options, request

from kvdepot.engines.vllm import nodes
from kvdepot.engines.vllm.meta import LoadReport
from kvdepot.engines.vllm.nodes import this_node, within_reach
from kvdepot.engines.vllm.options import read_options
from kvdepot.engines.vllm.scheduler import SchedulerSide
from kvdepot.engines.vllm.worker import WorkerSide


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({"pipeline": "Cache"}, False),
        ({"pipeline": "Cache|Posix"}, True),
        ({"pipeline": "Cache|Posix", "directories_shared": False}, False),
        ({"pipeline": "Cache|Dax", "dax_device_path": "/dev/dax0.0"}, False),
        ({"pipeline": "Cache|Dax|Remote", "dax_device_path": "/dev/dax0.0", "remote_servers": "a:1"}, True),
        ({"pipeline": "Cache|Object", "object_url": "s3://bucket/prefix"}, True),
    ],
)
def test_tiers_that_several_nodes_may_have_in_common(settings: dict[str, Any], shared: bool) -> None:
    assert read_options(settings).may_share_a_tier == shared


def test_an_engine_of_two_nodes_without_a_common_tier_is_refused() -> None:
    """Its lookups would ask one node's depot for the blocks of both, and never find them."""
    apart, together = SimpleNamespace(nnodes_within_dp=2), SimpleNamespace(nnodes_within_dp=1)
    shape = geometry()
    refused = within_reach(shape, apart, shares_a_tier=False)  # type: ignore[arg-type]
    assert "2 nodes" in refused.unsupported
    assert refused.groups == ()
    for parallel, shared in ((apart, True), (together, False), (SimpleNamespace(), False)):
        assert within_reach(shape, parallel, shares_a_tier=shared) is shape  # type: ignore[arg-type]
    other = replace(shape, unsupported="of the test's own making")
    assert within_reach(other, apart, shares_a_tier=False) is other  # type: ignore[arg-type]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("ranks", [["here", "here"], ["here", "there"], ["there", "there"], ["", ""]])
def test_ranks_say_where_they_run(
    ranks: list[str], shared: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray chooses their nodes after vLLM's configuration is made."""
    monkeypatch.setattr(nodes, "this_node", lambda: "here")
    side = SchedulerSide(FakeDepot(units=9), options(may_share_a_tier=shared), geometry(), 2)  # type: ignore[arg-type]
    side.reported(LoadReport(ranks=[replace(found(rank), node=node) for rank, node in enumerate(ranks)]))
    apart = "there" in ranks
    assert (side.match(request("r", 4 * BLOCK), 0) == (0, False)) == (apart and not shared)
    said = [(one.levelname, one.getMessage()) for one in caplog.records if "2 nodes" in one.getMessage()]
    assert [level for level, _ in said] == ([] if not apart else ["WARNING" if shared else "ERROR"])


def test_a_worker_reports_its_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    side = WorkerSide(None, options(), replace(geometry(), unsupported="no blocks"))  # type: ignore[arg-type]
    report = side.report()
    assert report is not None
    assert [rank.node for rank in report.ranks] == [this_node()]
    monkeypatch.setattr(nodes, "BOOT_ID", tmp_path / "absent")
    assert this_node() == ""
