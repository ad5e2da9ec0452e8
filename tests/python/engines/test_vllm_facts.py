"""Facts that distinguish one model's blocks from another's (P8)."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvdepot.engines.vllm.facts import (
    MEDIA_SETTINGS,
    canonical_of_version,
    config_digest,
    engine_facts,
    layer_ranges,
    length_facts,
    media_facts,
    names_weights,
    of_version,
    weights_facts,
)
from kvdepot.engines.vllm.groups import computes_all_tokens
from kvdepot.engines.vllm.options import read_options
from kvdepot.engines.weights import weights_digest
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


def test_a_file_whose_header_has_no_usable_offsets_is_sampled_as_any_file(tmp_path: Path) -> None:
    for offsets in ([["a", "b"], [1]], {"x": 1}, ["no", "number"], [-(1 << 40), 0], [0, 1 << 60]):
        header = json.dumps({"a": {"data_offsets": offsets}}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4096))
        assert weights_digest(tmp_path) != ""


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


def test_a_file_is_a_model_of_its_own(tmp_path: Path) -> None:
    """Two quantizations in one directory, as GGUF files are: vLLM and SGLang are given one of them."""

    def digest(name: str) -> object:
        model = SimpleNamespace(model=str(tmp_path / name), revision=None)
        return weights_facts(model, SimpleNamespace(load_format="auto", download_dir=None))["weights_digest"]

    (tmp_path / "m-Q4_K.gguf").write_bytes(bytes(512))
    alone = digest("m-Q4_K.gguf")
    # The directory's digest, as before there were two, so existing namespaces stay valid.
    assert alone == weights_digest(tmp_path) != ""
    assert digest(".") == alone
    (tmp_path / "m-Q8_0.gguf").write_bytes(b"\1" * 512)
    assert digest("m-Q4_K.gguf") == alone != digest("m-Q8_0.gguf")


@pytest.mark.parametrize("beside", ["m-00002-of-00002.gguf", "mmproj-f16.gguf"])
def test_what_belongs_to_a_file_is_digested_with_it(tmp_path: Path, beside: str) -> None:
    for name in ("m-00001-of-00002.gguf", "other-00002-of-00002.gguf", beside):
        (tmp_path / name).write_bytes(bytes(512))
    before = weights_digest(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "other-00002-of-00002.gguf").write_bytes(b"\1" * 512)
    assert weights_digest(tmp_path / "m-00001-of-00002.gguf") == before
    (tmp_path / beside).write_bytes(b"\1" * 512)
    assert weights_digest(tmp_path / "m-00001-of-00002.gguf") != before


def test_digests_of_ordinary_directories_stay(tmp_path: Path) -> None:
    """Another digest finds nothing that was stored before."""
    for name in ("model-00001-of-00002.bin", "model-00002-of-00002.bin", "config.json"):
        (tmp_path / name).write_bytes(bytes(range(256)) * 4)
    safetensors(tmp_path / "model.safetensors", bytes(range(256)) * 64)
    assert weights_digest(tmp_path) == "f57e77325319d16425313d0d3b0271b7"


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


def test_an_object_in_a_configuration_has_no_address() -> None:
    class Scaling:
        pass

    one, other = (SimpleNamespace(to_dict=lambda: {"scaling": Scaling()}) for _ in range(2))
    assert config_digest(one) == config_digest(other)


def loaded(path: object, load_format: str = "auto", **values: object) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A model and how it was loaded, as in vLLM's configuration."""
    model = SimpleNamespace(**{"model": str(path), "revision": None, **values})
    return model, SimpleNamespace(load_format=load_format, download_dir=None)


def test_weights_are_named_by_content_wherever_they_are_and_however_they_are_read(tmp_path: Path) -> None:
    for name in ("here", "0123abc"):
        (tmp_path / name).mkdir()
        safetensors(tmp_path / name / "model.safetensors", bytes(range(256)) * 64)
    facts = weights_facts(*loaded(tmp_path / "here"))
    assert names_weights(facts)
    assert facts == weights_facts(*loaded(tmp_path / "0123abc", "safetensors", revision="main"))
    assert facts == weights_facts(*loaded(tmp_path / "here", "runai_streamer"))
    assert facts != weights_facts(*loaded(tmp_path / "here"), "step-100")


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "ipc_cache", "a_plugin_s"])
def test_weights_that_do_not_come_from_the_model_s_files_are_not_named_by_them(
    tmp_path: Path, load_format: str
) -> None:
    safetensors(tmp_path / "model.safetensors", bytes(range(256)) * 64)
    facts = weights_facts(*loaded(tmp_path, load_format))
    assert not names_weights(facts)
    assert facts["load_format"] == load_format
    assert names_weights(weights_facts(*loaded(tmp_path, load_format), "step-100"))


def test_a_model_whose_files_are_not_found_is_not_named(tmp_path: Path) -> None:
    assert not names_weights(weights_facts(*loaded(tmp_path)))
    assert not names_weights(weights_facts(*loaded("nobody/nothing", revision="main")))


def model_with(config: dict[str, object], **values: object) -> SimpleNamespace:
    known: dict[str, object] = {"max_model_len": 4096, "override_generation_config": {}, "architecture": "Llama"}
    hf_config = SimpleNamespace(to_dict=lambda: config)
    return SimpleNamespace(hf_config=hf_config, try_get_generation_config=dict, **{**known, **values})


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}},
        {"rope_scaling": {"type": "su"}},
        {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}},
        {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
        {"text_config": {"attn_temperature_tuning": True}},
    ],
)
def test_the_longest_request_is_a_fact_where_rotation_or_temperature_depend_on_it(config: dict[str, object]) -> None:
    short, long = model_with(config), model_with(config, max_model_len=65536)
    tuned = model_with(config, override_generation_config={"attn_temperature_tuning": False})
    assert length_facts(short) == length_facts(model_with(config)) != length_facts(long)
    assert length_facts(tuned) != length_facts(short)


def test_the_longest_request_is_no_fact_elsewhere() -> None:
    config: dict[str, object] = {"model_type": "llama", "rope_parameters": {"rope_type": "llama3", "factor": 8.0}}
    assert length_facts(model_with(config)) == length_facts(model_with(config, max_model_len=65536)) == {}


def media(model: object = "none", **values: object) -> dict[str, object]:
    """Returns the facts of a model that takes media, with these settings."""
    settings = SimpleNamespace(**{**dict.fromkeys(MEDIA_SETTINGS), **values})
    config = SimpleNamespace(model=str(model), revision=None, multimodal_config=settings)
    return media_facts(config)  # type: ignore[arg-type]


def test_what_changes_the_embeddings_of_media_is_a_fact() -> None:
    assert media_facts(SimpleNamespace(multimodal_config=None)) == {}  # type: ignore[arg-type]
    assert media() == media(video_pruning_rate=None, mm_processor_kwargs=None, mm_processor_cache_gb=4)
    assert media(video_pruning_rate=0.5) != media(video_pruning_rate=0.25) != media()
    assert media(mm_encoder_attn_dtype="fp8") != media()


def test_how_an_engine_processes_media_is_a_fact() -> None:
    """P1: vLLM's media hashes have the request's options only, so engines with other options must not share blocks."""
    plain, cropped = {"do_normalize": False}, {"do_normalize": False, "do_center_crop": True}
    assert len({str(media(mm_processor_kwargs=kwargs)) for kwargs in (None, plain, cropped)}) == 3
    assert media(mm_processor_kwargs={"a": 1, "b": 2}) == media(mm_processor_kwargs={"b": 2, "a": 1})
    assert media(media_io_kwargs={"video": {"num_frames": 8}}) != media(media_io_kwargs={})
    assert media(mm_device_do_normalize=True) != media(mm_device_do_normalize=False)


def test_the_files_of_a_media_processor_are_a_fact(tmp_path: Path) -> None:
    """As after an edit of ``image_mean``. Where the files are does not matter."""
    for place, mean in (("here", 0.5), ("there", 0.5), ("edited", 0.4)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "preprocessor_config.json").write_text(json.dumps({"image_mean": mean}))
    assert media(tmp_path / "here") == media(tmp_path / "there") != media(tmp_path / "edited")
    assert media(tmp_path / "here") != media()


def facts_of_engine(
    speculative: object = None,
    load: object = None,
    declared: object = "",
    layout: str | None = "LBNHC",
    **values: object,
) -> dict[str, object]:
    """Returns the facts of an engine whose model has these options."""
    known: dict[str, object] = {"model": "m", "revision": None, "quantization": "online", "dtype": "bf16"}
    options: dict[str, object] = {"quantization_config": None, "model_class_overrides": None, "multimodal_config": None}
    model = model_with({}, **{**known, **options, **values})
    cache = SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256_cbor")
    parallel = SimpleNamespace(decode_context_parallel_size=1, cp_kv_cache_interleave_size=1)
    load = load or SimpleNamespace(load_format="dummy", download_dir=None)
    config = SimpleNamespace(
        model_config=model,
        cache_config=cache,
        parallel_config=parallel,
        load_config=load,
        speculative_config=speculative,
        attention_config=SimpleNamespace(),
        kernel_config=SimpleNamespace(),
    )
    cache_config = SimpleNamespace(kv_cache_layout=layout, kv_cache_groups=[])
    return engine_facts(config, cache_config, str(declared))  # type: ignore[arg-type]


def test_a_layout_that_vllm_has_not_said_is_no_fact_of_its_own() -> None:
    """P8: two layouts must not share an empty one."""
    with pytest.raises(ValueError, match="has not said which layout"):
        facts_of_engine(layout=None)


OVERRIDES = (
    {"quantization_config": {"linear": "fp8_per_tensor"}},
    {"quantization_config": {"linear": "mxfp8"}},
    {"quantization_config": {"linear": "mxfp8", "ignore": ["lm_head"]}},
    {"model_class_overrides": {"LlamaForCausalLM": "mine:Llama"}},
)


def test_options_that_make_another_model_of_the_same_files_are_facts() -> None:
    plain = facts_of_engine()
    found = [plain, *(facts_of_engine(**values) for values in OVERRIDES)]
    assert len({json.dumps(facts, sort_keys=True) for facts in found}) == len(found)
    assert facts_of_engine(**OVERRIDES[0]) == found[1]
    # Other facts would hide what engines without these options have stored.
    assert plain == facts_of_engine(quantization_config=None, model_class_overrides={})
    assert not {"quantization_config", "model_class_overrides"} & plain.keys()


def draft(model: object = "draft", config: SimpleNamespace | None = None, **values: object) -> SimpleNamespace:
    """Returns a draft's model as in vLLM's configuration."""
    hf_config = config or SimpleNamespace(to_dict=dict)
    known = {"model": str(model), "revision": None, "hf_config": hf_config}
    options = dict.fromkeys(("quantization", "quantization_config", "model_class_overrides"))
    return SimpleNamespace(**{**known, **options, **values})


def speculation(draft_model: SimpleNamespace, method: str | None = "draft_model", **values: object) -> SimpleNamespace:
    return SimpleNamespace(**{"method": method, "draft_model_config": draft_model, **values})


def test_quantization_of_a_draft_is_a_fact() -> None:
    def digest(config: SimpleNamespace | None = None, **values: object) -> object:
        return facts_of_engine(speculation(draft(config=config, **values)))["draft"]

    assert len({digest(), digest(quantization="fp8"), digest(quantization="mxfp8"), digest(**OVERRIDES[0])}) == 4
    # A quantised checkpoint says so in its configuration, which the digest contains.
    quantised = SimpleNamespace(to_dict=dict, quantization_config={"quant_method": "fp8"})
    assert digest(quantised, quantization="fp8") == digest()


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"])
def test_an_engine_that_speculates_without_kv_shares_with_one_that_does_not(method: str) -> None:
    """P8. For n-grams vLLM names the engine's own model as the draft."""
    assert facts_of_engine(speculation(draft("m"), method)) == facts_of_engine()


def file_loads(**values: object) -> SimpleNamespace:
    return SimpleNamespace(**{"load_format": "auto", "download_dir": None, **values})


@pytest.mark.parametrize("method", [None, "draft_model", "eagle", "mtp", "dspark", "a_later_one"])
def test_a_draft_is_known_by_its_weights_and_never_by_a_name(tmp_path: Path, method: str | None) -> None:
    """P1: another draft of the same name would be served the KV of the first."""
    for place, fill in (("model", b"m"), ("one", b"1"), ("copy", b"1"), ("other", b"2")):
        (tmp_path / place).mkdir()
        safetensors(tmp_path / place / "model.safetensors", fill * 4096)

    def facts(name: str, declared: str = "", **values: object) -> dict[str, object]:
        values = {"load": file_loads(), "model": str(tmp_path / "model"), "declared": declared, **values}
        own = speculation(
            draft(tmp_path / name), method, use_eagle=lambda: False, draft_load_config=values.pop("of_draft", None)
        )
        return facts_of_engine(own, **values)

    assert facts("one") == facts("copy") != facts("other")
    assert names_weights(facts("one"))
    for unknown in (facts("lost"), facts("one", of_draft=file_loads(load_format="dummy"))):
        assert not names_weights(unknown), "then weights in memory count, the draft's as well"
        assert unknown["draft"] != ""
    assert names_weights(facts("lost", "step-100"))


def test_weights_of_a_user_s_own_proposer_are_unknown(tmp_path: Path) -> None:
    """vLLM names the engine's own model, which is not what it runs."""
    safetensors(tmp_path / "model.safetensors", b"m" * 4096)
    own = speculation(draft(tmp_path), "custom_class", model="mine.Proposer", use_eagle=lambda: False)
    facts = facts_of_engine(own, load=file_loads(), model=str(tmp_path))
    assert facts["weights_digest"]
    assert not names_weights(facts)
    assert facts["draft_model"] == "mine.Proposer"


def test_a_version_of_the_weights_is_one_more_fact_for_worker_and_scheduler_alike() -> None:
    facts, layout = {"b": 1, "a": [2]}, [[1, [16]]]
    canonical = json.dumps({"facts": facts, "layout": layout})
    for version in ("v1", "v2"):
        described = json.loads(canonical_of_version(canonical, version))
        assert described == {"facts": json.loads(of_version(json.dumps(facts), version)), "layout": layout}
        assert described["facts"] == {**facts, "weights_version": version}
    assert canonical_of_version(canonical, "") == canonical
    assert of_version("{}", "") == "{}"


def test_options_come_from_a_file_or_inline_or_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "kvdepot.yaml"
    file.write_text("use_layerwise: false\npipeline: Cache\n")
    assert read_options(None).use_layerwise
    assert not read_options({"config": str(file)}).use_layerwise
    assert not read_options({"UCM_CONFIG_FILE": str(file)}).use_layerwise
    assert read_options({"hit_ratio": 0.5}).hit_ratio == 0.5
    assert read_options({"load_failure_policy": "fail"}).load_failure_policy == "fail"
    reset = read_options({"on_reset": "drop", "weights_version": 7, "config": str(file)})
    assert (reset.drop_at_reset, reset.weights_version, reset.use_layerwise) == (True, "7", False)
    assert (read_options(None).drop_at_reset, read_options(None).weights_version) == (False, "")


@pytest.mark.parametrize(
    "extra",
    [
        {"use_layerwize": True},
        {"config": "/x", "hit_ratio": 0.5},
        {"config": "/x", "UCM_CONFIG_FILE": "/y"},
        {"load_failure_policy": "ignore"},
        {"on_reset": "forget"},
        {"weights_version": ["a"]},
        {"weights_version": True},
    ],
)
def test_wrong_options_are_said(extra: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        read_options(extra)


@pytest.mark.parametrize("extra", ["x", "", 1, False, [("pool_gb", 1)]])
def test_options_that_are_no_mapping_are_said(extra: object) -> None:
    """vLLM checks its own, but not those of a child of MultiConnector."""
    with pytest.raises(ConfigError, match="kv_connector_extra_config: must be a mapping"):
        read_options(extra)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pooler", "prefix_caching", "refused"), [(None, False, False), ("MEAN", False, True), ("LAST", True, False)]
)
def test_pooling_models_that_need_every_token_are_refused(
    pooler: str | None, prefix_caching: bool, refused: bool
) -> None:
    model = SimpleNamespace(pooler_config=pooler, is_prefix_caching_supported=prefix_caching)
    assert bool(computes_all_tokens(model)) == refused
