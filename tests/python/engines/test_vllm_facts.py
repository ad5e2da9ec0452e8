"""What tells one model's blocks from another's (P8)."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvdepot.engines.vllm.facts import config_digest, layer_ranges
from kvdepot.engines.vllm.groups import computes_all_tokens
from kvdepot.engines.vllm.options import read_options
from kvdepot.engines.vllm.weights import weights_digest
from kvdepot.errors import ConfigError


def safetensors(path: Path, values: bytes) -> None:
    half = len(values) // 2
    spans = {"a": [0, half], "b": [half, len(values)]}
    header = json.dumps({k: {"dtype": "U8", "shape": [half], "data_offsets": v} for k, v in spans.items()}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + values)


def test_the_same_weights_elsewhere_have_the_same_digest(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        safetensors(tmp_path / name / "model.safetensors", bytes(range(256)) * 64)
    assert weights_digest(tmp_path / "here") == weights_digest(tmp_path / "there") != ""


def test_other_weights_of_the_same_shapes_have_another_digest(tmp_path: Path) -> None:
    values = bytearray(range(256)) * 64
    safetensors(tmp_path / "model.safetensors", bytes(values))
    before = weights_digest(tmp_path)
    values[len(values) * 3 // 4] ^= 1  # the middle of the second tensor
    safetensors(tmp_path / "model.safetensors", bytes(values))
    assert weights_digest(tmp_path) != before


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x10\0\0\0\0\0\0\0not json at all ....", bytes(7)])
def test_files_that_are_no_safetensors_are_digested_as_they_are(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert len(weights_digest(tmp_path)) == 32


def test_a_directory_without_weights_has_none(tmp_path: Path) -> None:
    assert weights_digest(tmp_path) == ""


def test_layers_are_named_in_short_and_without_ambiguity() -> None:
    names = [f"model.layers.{index}.self_attn.attn" for index in range(32)]
    assert layer_ranges(names) == ["model.layers.{0-31}.self_attn.attn"]
    assert layer_ranges(names[::2]) != layer_ranges(names[:16])
    assert layer_ranges([names[1], names[0]]) == ["model.layers.{1,0}.self_attn.attn"]
    mixed = ["draft.{0}.attn", "model.layers.{3}.self_attn.attn", "head"]
    assert layer_ranges(["draft.0.attn", names[3], "head"]) == mixed


def test_who_wrote_the_configuration_does_not_matter() -> None:
    def config(**values: object) -> SimpleNamespace:
        return SimpleNamespace(to_dict=lambda: values)

    assert config_digest(config(a=1, transformers_version="1")) == config_digest(config(a=1, _name_or_path="/x"))
    assert config_digest(config(a=1)) != config_digest(config(a=2))


def test_options_come_from_a_file_or_inline_or_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "kvdepot.yaml"
    file.write_text("use_layerwise: false\npipeline: Cache\n")
    assert read_options(None).use_layerwise
    assert not read_options({"config": str(file)}).use_layerwise
    assert not read_options({"UCM_CONFIG_FILE": str(file)}).use_layerwise
    assert read_options({"hit_ratio": 0.5}).hit_ratio == 0.5
    assert read_options({"load_failure_policy": "fail"}).load_failure_policy == "fail"


@pytest.mark.parametrize(
    "extra",
    [
        {"use_layerwize": True},
        {"config": "/x", "hit_ratio": 0.5},
        {"config": "/x", "UCM_CONFIG_FILE": "/y"},
        {"load_failure_policy": "ignore"},
    ],
)
def test_wrong_options_are_said(extra: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        read_options(extra)


@pytest.mark.parametrize(
    ("pooler", "prefix_caching", "refused"), [(None, False, False), ("MEAN", False, True), ("LAST", True, False)]
)
def test_pooling_models_that_need_every_token_are_refused(
    pooler: str | None, prefix_caching: bool, refused: bool
) -> None:
    model = SimpleNamespace(pooler_config=pooler, is_prefix_caching_supported=prefix_caching)
    assert bool(computes_all_tokens(model)) == refused
