"""Real vLLM with the depot's connector and another one below `MultiConnector`, in both orders."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from engine_lab import Lab
from test_vllm import RESET, generate

PROMPTS = [[[1, 230]], [[2, 200]], [[3, 150]]]
HITS = [224, 192, 128]
RESET_ALL = {"do": "reset_all"}


def below(*, first: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Puts the depot's connector below a `MultiConnector`, with the sibling before or after it."""

    def wrap(depot: dict[str, Any]) -> dict[str, Any]:
        sibling = {"kv_connector": "Sibling", "kv_role": "kv_both", "kv_connector_module_path": "sibling"}
        # By its registered name, which vLLM knows from the package's plugin.
        depot = {key: value for key, value in depot.items() if key != "kv_connector_module_path"}
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [sibling, depot] if first == "sibling" else [depot, sibling]},
        }

    return wrap


def mode(name: str) -> dict[str, str]:
    return {"do": "sibling", "mode": name}


def phase(name: str) -> dict[str, Any]:
    return {**generate(name, PROMPTS, 8), "one_by_one": True}


@pytest.mark.parametrize("first", ["sibling", "depot"])
def test_a_sibling_s_blocks_are_stored_and_its_failures_are_not(real_lab: Lab, first: str) -> None:
    """Blocks that the sibling loads are stored, too; blocks computed on its failed load are not (P1)."""
    run = real_lab.run(
        "llama",
        [
            {"do": "attached"},
            phase("cold"),
            RESET,
            mode("off"),
            phase("from the depot"),
            RESET_ALL,
            mode("serves"),
            phase("from the sibling"),
            RESET,
            mode("off"),
            phase("from the depot again"),
            RESET_ALL,
            mode("fails"),
            phase("sibling fails"),
            RESET,
            mode("off"),
            phase("after the failure"),
        ],
        options={"on_reset": "drop"},  # else the depot has everything again after a reset: the weights are the same
        engine={"disable_hybrid_kv_cache_manager": True},
        beside=below(first=first),
    )
    assert run["cold"]["cached"] == [0, 0, 0]
    assert run["from the depot"]["cached"] == HITS
    assert run["from the sibling"]["cached"] == HITS
    assert run["from the depot again"]["cached"] == HITS
    for name in ("from the depot", "from the sibling", "from the depot again", "sibling fails", "after the failure"):
        assert run[name]["tokens"] == run["cold"]["tokens"], name
    assert run["after the failure"]["cached"] == HITS
    found = sum(value for name, value in run["metrics"].items() if name.startswith("vllm:kvdepot_hit_tokens/"))
    assert found == 3 * sum(HITS)


@pytest.mark.parametrize("first", ["sibling", "depot"])
def test_what_another_engine_has_prefilled_is_left_to_the_sibling(real_lab: Lab, first: str) -> None:
    """Its requests are not looked up, in whatever order the connectors are; the others are."""
    prefilled = {**phase("prefilled"), "kv_transfer_params": {"do_remote_prefill": True}}
    run = real_lab.run(
        "llama",
        [{"do": "attached"}, phase("cold"), RESET, prefilled, RESET, mode("off"), phase("from the depot")],
        engine={"disable_hybrid_kv_cache_manager": True},
        beside=below(first=first),
    )
    for name in ("prefilled", "from the depot"):
        assert run[name]["cached"] == HITS
        assert run[name]["tokens"] == run["cold"]["tokens"], name
    found = sum(value for name, value in run["metrics"].items() if name.startswith("vllm:kvdepot_hit_tokens/"))
    assert found == sum(HITS)
    assert run["metrics"]["vllm:kvdepot_misses/remote"] == len(PROMPTS)


@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
@pytest.mark.parametrize("below_another", [True, False])
def test_the_connector_knows_whether_it_has_siblings(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, role: str, below_another: bool
) -> None:
    """vLLM does not tell a connector; without this, pages of others would be tested, and their requests delayed."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    from kvdepot.engines.vllm import connector, groups
    from kvdepot.engines.vllm.attachment import NoDepot

    load_general_plugins()
    monkeypatch.setattr(connector, "attach", lambda *_: NoDepot())
    monkeypatch.setattr(groups, "_supported", lambda *_: groups.Geometry((), 16, 16))
    monkeypatch.setattr("kvdepot.engines.vllm.drafts.drafts_of", lambda *_: None)
    kv: dict[str, Any] = {"kv_connector": "KVDepotConnector", "kv_role": "kv_both"}
    if below_another:
        kv = below(first="depot")(kv)
    config = EngineArgs(lab.model("llama"), dtype="float32", kv_transfer_config=kv).create_engine_config()
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    cache: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace()], num_blocks=1, kv_cache_tensors=[])
    made = KVConnectorFactory.create_connector(config, KVConnectorRole[role], cache)
    ours = made.sub_connectors[0] if below_another else made
    side = ours._scheduler or ours._worker
    assert side._has_siblings == below_another
    made.shutdown()
