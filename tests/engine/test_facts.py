"""The namespace's facts from vLLM's own configuration objects; no engine runs here."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_lab import Lab

from kvdepot.engines.vllm.facts import engine_facts, names_weights, weights_facts
from kvdepot.engines.vllm.option_facts import ENVIRONMENT
from kvdepot.engines.weights import weights_digest

CACHE: Any = SimpleNamespace(kv_cache_layout="LBHNC", kv_cache_groups=[])
FACTORS = 32
LONG_ROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * FACTORS,
        "long_factor": [2.0] * FACTORS,
        "original_max_position_embeddings": 1024,
    }
}


def facts(model: str, declared: str = "", **arguments: Any) -> dict[str, object]:
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model, dtype="float32", block_size=32, **arguments).create_engine_config()
    return engine_facts(config, CACHE, declared)


def test_another_context_length_is_another_namespace_for_long_rope_alone(lab: Lab) -> None:
    model = lab.model("llama")
    assert facts(model, max_model_len=512) == facts(model, max_model_len=2048)
    short, long = (facts(model, max_model_len=tokens, hf_overrides=LONG_ROPE) for tokens in (512, 2048))
    assert short != long
    assert short["config_digest"] == long["config_digest"], "nothing else tells them apart"


def test_a_copy_elsewhere_that_is_read_otherwise_is_the_same_model(lab: Lab, tmp_path: Path) -> None:
    model, copy = lab.model("llama"), tmp_path / "0123abc"
    shutil.copytree(model, copy)
    assert facts(model) == facts(str(copy), load_format="safetensors", revision="main")
    assert facts(model) != facts(model, "step-100")
    assert facts(model) != facts(model, load_format="dummy")


@pytest.mark.parametrize("arguments", [{"load_format": "dummy"}, {"load_format": "tensorizer"}])
def test_weights_that_are_not_in_the_model_s_files_have_no_name_by_them(lab: Lab, arguments: dict[str, Any]) -> None:
    model = lab.model("llama")
    assert names_weights(facts(model))
    assert not names_weights(facts(model, **arguments))


def test_weights_of_the_hub_are_found_where_vllm_was_told_to_put_them(lab: Lab, tmp_path: Path) -> None:
    weights = Path(lab.model("llama"), "model.safetensors")
    hub = tmp_path / "models--team--model"
    (hub / "snapshots" / "0123abc").mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("0123abc")
    shutil.copy(weights, hub / "snapshots" / "0123abc")
    model = SimpleNamespace(model="team/model", revision=None)
    found, lost = (
        weights_facts(model, SimpleNamespace(load_format="auto", download_dir=str(place)))
        for place in (tmp_path, tmp_path / "elsewhere")
    )
    assert found["weights_digest"] == weights_digest(weights.parent)
    assert not names_weights(lost)


def test_a_model_without_weights_has_no_name(lab: Lab, tmp_path: Path) -> None:
    """Like a model whose weights are streamed from a bucket: only its configuration is local."""
    for file in Path(lab.model("llama")).iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    assert not names_weights(facts(str(tmp_path)))


def test_variables_have_usual_values_unless_they_are_set() -> None:
    from vllm import envs

    known = [name for name in ENVIRONMENT if hasattr(envs, name) and name not in os.environ]
    assert len(known) > 30
    assert [name for name in known if getattr(envs, name) not in ENVIRONMENT[name]] == []


def test_a_variable_that_quantises_activations_is_a_fact(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lab.model("llama")
    before = facts(model)
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "0")  # its default, spelt otherwise than vLLM spells it
    assert facts(model) == before
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    assert facts(model) == {**before, "options": {"VLLM_MARLIN_INPUT_DTYPE": "int8"}}
