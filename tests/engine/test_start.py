"""vLLM's decisions and messages at its start, by its own configuration classes and servers: graphs, mistakes, order."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_lab import HERE, Lab

from kvdepot.engines.vllm.early import WrongConfigurationError
from kvdepot.engines.vllm.options import read_options

FULL = {"cudagraph_mode": "FULL_AND_PIECEWISE"}
SEED_FILE = """\
ucm_connectors:
  - ucm_connector_name: "UcmPipelineStore"
    ucm_connector_config:
      store_pipeline: "Cache|Empty"
"""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes vLLM choose graphs as it does on a GPU; nothing runs on one."""
    from vllm.platforms import current_platform

    kind = type(current_platform)
    monkeypatch.setattr(kind, "is_cpu", lambda self: False)
    monkeypatch.setattr(kind, "is_cuda_alike", lambda self: True)
    monkeypatch.setattr(kind, "support_static_graph_mode", classmethod(lambda cls: True))
    monkeypatch.setattr(kind, "support_hybrid_kv_cache", classmethod(lambda cls: True))
    # On a CPU it removes graphs from every configuration.
    monkeypatch.setattr(kind, "check_and_update_config", classmethod(lambda cls, config: None))


def transfer(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {"kv_connector": "KVDepotConnector", "kv_role": role, "kv_connector_extra_config": extra}


def graphs(model: str, kv: dict[str, Any], **arguments: Any) -> str:
    """Returns the mode of CUDA graphs that vLLM chooses with a connector."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    args = EngineArgs(
        model, dtype="float32", block_size=32, kv_transfer_config=kv, compilation_config=FULL, **arguments
    )
    return args.create_engine_config().compilation_config.cudagraph_mode.name


@pytest.mark.usefixtures("cuda")
def test_full_graphs_stay_unless_the_user_asks_for_layers(lab: Lab, tmp_path: Path) -> None:
    model = lab.model("llama")
    seed = tmp_path / "seed.yaml"
    seed.write_text(SEED_FILE)
    whole = tmp_path / "whole.yaml"
    whole.write_text(SEED_FILE + "use_layerwise: false\n")
    assert graphs(model, transfer()) == "FULL_AND_PIECEWISE"
    assert graphs(model, transfer(use_layerwise="auto")) == "FULL_AND_PIECEWISE"
    assert graphs(model, transfer(use_layerwise=False)) == "FULL_AND_PIECEWISE"
    assert graphs(model, transfer(use_layerwise=True)) == "PIECEWISE"
    assert graphs(model, transfer(UCM_CONFIG_FILE=str(seed))) == "PIECEWISE"
    assert graphs(model, transfer(UCM_CONFIG_FILE=str(whole))) == "FULL_AND_PIECEWISE"
    assert graphs(model, transfer("kv_consumer", use_layerwise=True)) == "PIECEWISE"


@pytest.mark.usefixtures("cuda")
def test_full_graphs_stay_where_no_step_loads_layer_by_layer(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    llama, gemma = lab.model("llama"), lab.model("gemma3")
    assert graphs(llama, transfer("kv_producer", use_layerwise=True)) == "FULL_AND_PIECEWISE"
    assert graphs(gemma, transfer(use_layerwise=True)) == "FULL_AND_PIECEWISE"
    assert graphs(gemma, transfer(use_layerwise=True), disable_hybrid_kv_cache_manager=True) == "PIECEWISE"
    child = transfer("kv_producer", use_layerwise=True)
    for role, mode in (("kv_producer", "FULL_AND_PIECEWISE"), ("kv_both", "PIECEWISE")):
        below = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [{**child, "kv_role": role}]},
        }
        assert graphs(llama, below) == mode
    # The connector is off for such a model.
    monkeypatch.setattr("kvdepot.engines.vllm.graphs.computes_all_tokens", lambda model: "it pools over all tokens")
    assert graphs(llama, transfer(use_layerwise=True)) == "FULL_AND_PIECEWISE"


@pytest.mark.usefixtures("cuda")
def test_where_full_graphs_stayed_loads_go_between_steps() -> None:
    """Regardless of what was assumed before the KV cache was laid out (P1)."""
    from vllm.config import CUDAGraphMode

    from kvdepot.engines.vllm.graphs import may_replay_whole_steps

    def replays(mode: Any) -> bool:
        return may_replay_whole_steps(SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode)))  # type: ignore[arg-type]

    assert [replays(mode) for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, None)] == [False] * 3
    assert replays(CUDAGraphMode.FULL_DECODE_ONLY)
    assert replays(CUDAGraphMode.FULL_AND_PIECEWISE)


def test_on_a_cpu_layers_go_one_by_one_as_before() -> None:
    assert read_options(None).use_layerwise
    assert read_options(None).loads_in_steps


@pytest.mark.parametrize("name", ["KVDepotConnector", "UCMConnector"])
@pytest.mark.parametrize("module", [None, "kvdepot.engines.vllm"])
def test_mistakes_are_found_while_vllm_makes_its_configuration(lab: Lab, name: str, module: str | None) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    kv = {**transfer(pool_bg=1), "kv_connector": name, "kv_connector_module_path": module}
    with pytest.raises(WrongConfigurationError, match="pool_bg: unknown key: did you mean pool_gb"):
        EngineArgs(lab.model("llama"), kv_transfer_config=kv).create_engine_config()


def test_hashes_that_find_nothing_again_are_a_mistake_as_well(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(WrongConfigurationError, match="PYTHONHASHSEED"):
        EngineArgs(
            lab.model("llama"), kv_transfer_config=transfer(), prefix_caching_hash_algo="xxhash"
        ).create_engine_config()


def beside_a_sibling(depot: dict[str, Any]) -> dict[str, Any]:
    """Puts the connector below a `MultiConnector`, after one that vLLM's question about KV-cache groups ends at."""
    sibling = {"kv_connector": "Sibling", "kv_role": "kv_both", "kv_connector_module_path": "sibling"}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [sibling, depot]},
    }


@pytest.mark.parametrize("place", [dict, beside_a_sibling], ids=["alone", "beside a sibling"])
def test_a_mistake_is_the_last_line_of_a_server_that_does_not_start(lab: Lab, tmp_path: Path, place: Any) -> None:
    """It ends before weights are read, of which the model has none here, and before a worker is started."""
    file = tmp_path / "kvdepot.yaml"
    file.write_text("pipeline: Cache\npool_bg: 64\n")
    model = tmp_path / "model"
    shutil.copytree(lab.model("llama"), model, ignore=shutil.ignore_patterns("*.safetensors"))
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model), "--dtype", "float32"]
    command += ["--kv-transfer-config", json.dumps(place(transfer(config=str(file))))]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([environ.get("PYTHONPATH", ""), str(HERE)])
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300, check=False)
    assert ended.returncode != 0
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    assert lines[-1].endswith(f"{file}:2: pool_bg: unknown key: did you mean pool_gb?"), "\n".join(lines[-20:])
    for process in ("engine core", "enginecore", "(worker"):
        assert process not in (ended.stdout + ended.stderr).lower(), "it went on to start an engine"


def test_a_model_that_cannot_use_the_depot_attaches_none(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started for it either: the geometry of its cache is checked first."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs

    from kvdepot.engines.vllm import connector as module
    from kvdepot.engines.vllm import groups

    attached: list[Any] = []
    monkeypatch.setattr(module, "attach", lambda *given: attached.append(given))
    monkeypatch.setattr(groups, "computes_all_tokens", lambda model: "of the test's own making")
    config = EngineArgs(lab.model("llama"), dtype="float32", kv_transfer_config=transfer()).create_engine_config()
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace()], num_blocks=1, kv_cache_tensors=[])
    for role in KVConnectorRole:
        side = module.KVDepotConnector(config, role, cache)
        if role is KVConnectorRole.SCHEDULER:
            assert side.reset_cache()
        side.shutdown()
    assert attached == []


@pytest.mark.parametrize("pipeline", ["Cache", "Cache|Posix"])
def test_an_engine_on_two_nodes_attaches_a_depot_only_with_a_tier_that_they_may_share(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, pipeline: str, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs

    from kvdepot.engines.vllm import connector as module
    from kvdepot.engines.vllm import groups
    from kvdepot.engines.vllm.attachment import NoDepot

    attached: list[Any] = []

    def attach(*given: Any) -> Any:
        attached.append(given)
        return NoDepot()

    monkeypatch.setattr(module, "attach", attach)
    monkeypatch.setattr(groups, "_supported", lambda *_: groups.Geometry((), 16, 16))
    monkeypatch.setattr("kvdepot.engines.vllm.drafts.drafts_of", lambda *_: None)
    kv = transfer(pipeline=pipeline)
    config = EngineArgs(lab.model("llama"), dtype="float32", kv_transfer_config=kv).create_engine_config()
    config.parallel_config.nnodes = 2
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace()], num_blocks=1, kv_cache_tensors=[])
    module.KVDepotConnector(config, KVConnectorRole.SCHEDULER, cache).shutdown()
    assert ("2 nodes" in caplog.text) == (not attached) == (pipeline == "Cache")
