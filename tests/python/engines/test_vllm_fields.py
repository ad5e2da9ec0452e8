"""No option of any release of vLLM changes the bytes of blocks unnoticed (P8)."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_environment
from vllm_fields import HARMLESS, REFLECTED, WHOLE_CLASSES

from kvdepot.engines.vllm.option_facts import CHANGES, ENVIRONMENT, LORA_CHANGES, as_text, lora_options, option_facts

TABLES = Path(__file__).parent / "vllm_surface"
WHOLE = {path.stem: json.loads(path.read_text()) for path in TABLES.glob("*.json")}
FIELDS = {release: table["fields"] for release, table in WHOLE.items()}
VARIABLES = {release: table["environment"] for release, table in WHOLE.items()}
RELEASES = sorted(FIELDS, key=lambda name: int(name.split(".")[1]))
CLASSES = {
    "cache_config": "CacheConfig",
    "attention_config": "AttentionConfig",
    "kernel_config": "KernelConfig",
    "model_config": "ModelConfig",
    "vllm_config": "VllmConfig",
}
FACTS = {
    *("weights_digest", "load_format", "config_digest", "dtype", "cache_dtype", "layout", "hash", "backend", "layers"),
    *("quantization", "quantization_config", "model_class_overrides", "max_model_len", "generation", "media", "draft"),
    *("block_tokens", "spec", "kv_shards", "dcp", "dcp_interleave", "options", "adapter"),
}


def harmless(name: str) -> list[str]:
    return [field for fields in HARMLESS.get(name, {}).values() for field in fields.split()]


@pytest.mark.parametrize("release", RELEASES)
def test_every_field_of_the_configuration_is_a_fact_or_has_a_reason_not_to_be(release: str) -> None:
    found = FIELDS[release]
    assert len(found["ModelConfig"]) > 50
    unknown = {
        f"{name}.{field}"
        for name, fields in found.items()
        if name not in WHOLE_CLASSES
        for field in fields
        if field not in REFLECTED.get(name, {}) and field not in harmless(name)
    }
    assert not unknown, "does it change what is computed for the same tokens? Then it needs a fact (option_facts)"


def test_nothing_is_classified_twice_and_every_class_and_field_exists() -> None:
    exist = {(name, field) for fields in FIELDS.values() for name, some in fields.items() for field in some}
    named = [(name, field) for name in {*REFLECTED, *HARMLESS} for field in (*REFLECTED.get(name, ()), *harmless(name))]
    assert len(named) == len(set(named))
    assert set(named) <= exist
    assert {name for name, _ in exist} == {*REFLECTED, *HARMLESS, *WHOLE_CLASSES}
    assert not {*REFLECTED, *HARMLESS} & WHOLE_CLASSES.keys()


def test_options_that_are_facts_are_those_that_are_read() -> None:
    assert {fact for fields in REFLECTED.values() for fact in fields.values()} <= FACTS
    for config, name in CLASSES.items():
        reflected = {field for field, fact in REFLECTED[name].items() if fact == "options"}
        assert reflected == CHANGES[config].keys()
    assert LORA_CHANGES.keys() < REFLECTED["LoRAConfig"].keys()


@pytest.mark.parametrize("release", RELEASES)
def test_every_variable_of_the_environment_is_a_fact_or_has_a_reason_not_to_be(release: str) -> None:
    harmless = {name for names in vllm_environment.HARMLESS.values() for name in names.split()}
    assert len(VARIABLES[release]) > 250
    unknown = {*VARIABLES[release]} - vllm_environment.REFLECTED.keys() - harmless
    assert not unknown, "does it change what is computed for the same tokens? Then it needs a fact (ENVIRONMENT)"


def test_no_variable_is_classified_twice_and_every_one_exists() -> None:
    harmless = [name for names in vllm_environment.HARMLESS.values() for name in names.split()]
    named = [*ENVIRONMENT, *vllm_environment.NAMED, *harmless]
    assert len(named) == len(set(named))
    assert set(named) == {name for names in VARIABLES.values() for name in names}
    assert {*vllm_environment.REFLECTED.values()} <= FACTS


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``vllm.envs``: what it reads, for the variables that a test sets."""
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    envs = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(envs=envs))
    return envs


@pytest.mark.parametrize("name", sorted(ENVIRONMENT))
def test_a_variable_that_changes_bytes_is_a_fact(
    name: str, variables: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever the variables' text is: vLLM knows spellings and defaults.
    monkeypatch.setenv(name, "text")
    for usual in ENVIRONMENT[name]:
        setattr(variables, name, usual)
        assert options_of(engine()) == {}
    setattr(variables, name, {"dtype": "int4"})
    assert options_of(engine()) == {"options": {name: '{"dtype": "int4"}'}}


def test_variables_that_are_not_set_or_that_a_release_does_not_know_are_no_facts(
    variables: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables.VLLM_MARLIN_INPUT_DTYPE = "int8"
    assert options_of(engine()) == {}
    monkeypatch.setenv("VLLM_ROCM_MUSE_MOE_ONLINE_QUANT", "mxfp4")
    assert options_of(engine()) == {}


def engine(**changed: Any) -> Any:
    """Returns a configuration with the usual values of all options, but for these: ``config__field``."""
    configs = {
        config: SimpleNamespace(**{field: usual[0] for field, usual in fields.items()})
        for config, fields in CHANGES.items()
    }
    for path, value in changed.items():
        config, _, field = path.partition("__")
        setattr(configs[config], field, value)
    configs["model_config"].architecture = "LlamaForCausalLM"
    whole = vars(configs.pop("vllm_config"))
    return SimpleNamespace(**configs, **whole)


def options_of(vllm_config: Any, states: bool = True) -> dict[str, object]:
    """Returns the facts of an engine with layers of these kinds, of which some may be in one group."""
    attention, mamba = SimpleNamespace(), SimpleNamespace(mamba_cache_mode="align")
    inner = {"a": attention, "b": mamba} if states else {"a": attention}
    specs = (attention, SimpleNamespace(kv_cache_specs=inner))
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return option_facts(vllm_config, SimpleNamespace(kv_cache_groups=groups))  # type: ignore[arg-type]


def test_an_option_with_its_usual_value_is_no_fact() -> None:
    """Other facts would hide what engines have stored before."""
    assert options_of(engine()) == {}
    assert options_of(engine(model_config__model_impl="vllm", kernel_config__linear_backend_per_quant={})) == {}


@pytest.mark.parametrize(
    ("path", "one", "other"),
    [
        ("cache_config__kv_cache_dtype_skip_layers", ["0"], ["sliding_window"]),
        ("cache_config__mamba_ssm_cache_dtype", "float32", "float16"),
        ("attention_config__indexer_kv_dtype", "fp8", "bf16"),
        ("kernel_config__moe_backend", "marlin", "cutlass"),
        ("kernel_config__linear_backend_per_quant", {"fp8": "triton"}, {"fp8": "cutlass"}),
        ("model_config__code_revision", "one", "other"),
        ("vllm_config__additional_config", {"a": 1}, {"a": 2}),
        ("vllm_config__diffusion_config", "canvas 32", "canvas 64"),
    ],
)
def test_an_option_that_changes_bytes_is_a_fact(path: str, one: object, other: object) -> None:
    found = [options_of(engine(**values)) for values in ({}, {path: one}, {path: other}, {path: other})]
    assert found[2] == found[3]
    assert len({json.dumps(facts) for facts in found}) == 3


def test_the_order_of_layers_and_keys_does_not_matter() -> None:
    skip = "cache_config__kv_cache_dtype_skip_layers"
    assert options_of(engine(**{skip: ["2", "0"]})) == options_of(engine(**{skip: ["0", "2"]}))
    more = "vllm_config__additional_config"
    assert options_of(engine(**{more: {"a": 1, "b": 2}})) == options_of(engine(**{more: {"b": 2, "a": 1}}))


def test_options_of_states_are_facts_of_models_that_have_some() -> None:
    """On a CPU vLLM sets the data type of every model's states, if it has any or not."""
    one = engine(cache_config__mamba_ssm_cache_dtype="float32", kernel_config__moe_backend="marlin")
    assert options_of(one) == {"options": {"mamba_ssm_cache_dtype": "float32", "moe_backend": "marlin"}}
    assert options_of(one, states=False) == {"options": {"moe_backend": "marlin"}}


@pytest.mark.parametrize(
    ("architecture", "own", "taken", "other"),
    [
        ("NemotronHForCausalLM", {"mamba_ssm_cache_dtype": "float16"}, "float16", "float32"),
        ("NemotronHForCausalLM", {}, "float32", "float16"),
        ("Qwen3_5MoeForCausalLM", {"mamba_ssm_dtype": "float32"}, "float32", "bfloat16"),
        ("Qwen3_5MoeForCausalLM", {}, "auto", "float32"),
        ("Qwen3NextForCausalLM", {"mamba_ssm_dtype": "float32"}, "auto", "float32"),
    ],
)
def test_what_vllm_takes_from_a_models_configuration_is_no_fact(
    architecture: str, own: dict[str, str], taken: str, other: str
) -> None:
    for value, fact in ((taken, {}), (other, {"options": {"mamba_ssm_cache_dtype": as_text(other)}})):
        one = engine(cache_config__mamba_ssm_cache_dtype=value)
        one.model_config.architecture, one.model_config.hf_text_config = architecture, SimpleNamespace(**own)
        assert options_of(one) == fact


def test_a_release_that_lacks_an_option_has_no_fact_of_it() -> None:
    config = engine()
    del config.attention_config.indexer_sparse_logits
    assert options_of(config) == {}


def test_options_of_adapters_are_facts_of_adapters_alone() -> None:
    def options(**lora: object) -> dict[str, str]:
        config = SimpleNamespace(**{"lora_dtype": "bfloat16", "target_modules": None, **lora})
        return lora_options(SimpleNamespace(lora_config=config, model_config=SimpleNamespace(dtype="bfloat16")))  # type: ignore[arg-type]

    assert lora_options(SimpleNamespace(lora_config=None)) == {}  # type: ignore[arg-type]
    assert options() == {}
    assert options(target_modules=["q_proj", "v_proj"]) == options(target_modules=["v_proj", "q_proj"]) != {}
    assert options(lora_dtype="float16") != {}
