"""Parts of kvdepot in SGLang that need neither SGLang nor a depot: options, pages, hits, leases and namespaces."""

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang_parts import (
    LAYERS,
    PAGE,
    IndexerPoolHost,
    LogicalPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    Model,
    Storage,
    UntoldPool,
)

from kvdepot.engines.sglang import engine, facts, report
from kvdepot.engines.sglang.hits import ALL_PAGES, TRAILING_PAGES, common, leading, restorable
from kvdepot.engines.sglang.keys import HASH_BYTES, page_hashes
from kvdepot.engines.sglang.leases import LEASE_S, Leases
from kvdepot.engines.sglang.options import SGLANG_KEYS, Options, read_extra_config
from kvdepot.engines.sglang.pages import BY_LAYER, Pages
from kvdepot.errors import ConfigError

V1 = {"interface_v1": 1}


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "interface_v1: must be 1"),
        ({"interface_v1": 0}, "interface_v1: must be 1"),
        ({**V1, "pool_gbs": 1}, "pool_gbs.*did you mean pool_gb"),
        ({**V1, "config": "a.yaml", "pool_gb": 1}, "config: names a file, but there are other keys, too: pool_gb"),
        ({**V1, "mode": "embedded"}, "mode: embedded"),
        ({**V1, "share_depot": False}, "share_depot: false"),
        ({**V1, "pipeline": "Staging|Posix", "directories": ["/tmp"]}, "begin it with Cache"),
        ({**V1, "weights_version": True}, "weights_version: must be a name"),
        ({**V1, "salt": ["a"]}, "salt: must be a name"),
    ],
)
def test_mistakes_end_the_start_with_their_key(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_extra_config(extra)


def test_the_extra_config_has_our_keys_beside_those_of_sglang(tmp_path: Path) -> None:
    theirs = dict.fromkeys(SGLANG_KEYS, 1)
    found = read_extra_config({**theirs, "pool_gb": 1, "weights_version": 7, "salt": "tenant"})
    assert (found.config.pool_gb, found.weights_version, found.salt, found.config.mode) == (1, "7", "tenant", "node")
    file = tmp_path / "kvdepot.yaml"
    file.write_text("pool_gb: 2\n")
    assert read_extra_config({**theirs, "config": str(file)}).config.pool_gb == 2


def addressed(pages: Pages, count: int, indices: Any) -> bytes:
    """Returns the bytes of pages, gathered from the addresses of their pieces."""
    found = b""
    buffer = pages.pool.buffer
    for row in pages.addresses(indices, count).tolist():
        for address, size in zip(row, pages.sizes, strict=True):
            begin = address - buffer.ctypes.data
            found += buffer[begin : begin + size].tobytes()
    return found


@pytest.mark.parametrize("kind", [MHATokenToKVPoolHost, MLATokenToKVPoolHost])
@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_layouts_of_equal_bytes_have_one_form(kind: Any, layout: str) -> None:
    pool = kind(layout)
    pool.fill()
    pages = Pages.of(pool, "kv")
    assert pages is not None
    assert (pages.form, len(pages.sizes)) == (BY_LAYER, kind.tensors * LAYERS)
    assert addressed(pages, 2, pool.indices(5, 3)) == pool.page(5).tobytes() + pool.page(3).tobytes()


@pytest.mark.parametrize(("kind", "layout"), [(MHATokenToKVPoolHost, "page_first"), (IndexerPoolHost, "layer_first")])
def test_other_orders_of_bytes_are_forms_of_their_own(kind: Any, layout: str) -> None:
    pool = kind(layout)
    pool.fill()
    pages = Pages.of(pool, "kv")
    assert pages is not None
    assert pages.form == layout
    assert addressed(pages, 1, pool.indices(7)) == pool.page(7).tobytes()


def test_pools_without_addresses() -> None:
    assert Pages.of(LogicalPool(), "kv") is None
    with pytest.raises(ConfigError, match=r"pool mamba: layout layer_first.*--hicache-mem-layout page_first"):
        Pages.of(UntoldPool(), "mamba")
    with pytest.raises(ConfigError, match="choose a smaller --page-size"):
        Pages.of(SimpleNamespace(page_size=1, layout="x", get_page_buffer_meta=lambda _: ([0], [2 << 30])), "kv")


def test_indices_that_are_not_those_pages_are_refused() -> None:
    pages = Pages.of(MHATokenToKVPoolHost(), "kv")
    assert pages is not None
    with pytest.raises(ValueError, match="indices for 2 pages"):
        pages.addresses(np.arange(PAGE), 2)


def test_which_lengths_can_be_restored() -> None:
    found = np.array([1, 1, 0, 1, 1], dtype=bool)
    assert leading(found) == 2
    assert leading(found[:2]) == 2
    assert np.flatnonzero(restorable(found, 5, ALL_PAGES, 0)).tolist() == [0, 1, 2]
    assert np.flatnonzero(restorable(found, 5, TRAILING_PAGES, 1)).tolist() == [0, 1, 2, 4, 5]
    assert np.flatnonzero(restorable(found, 5, TRAILING_PAGES, 2)).tolist() == [0, 1, 2, 5]
    assert np.flatnonzero(restorable(found, 3, TRAILING_PAGES, 9)).tolist() == [0, 1, 2]
    every = np.ones(6, dtype=bool)
    assert common([every, restorable(found, 5, TRAILING_PAGES, 2)]) == [1, 2, 5]
    assert common([restorable(found, 0, ALL_PAGES, 0)]) == []


class Claim:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_a_hit_is_held_until_all_of_its_pools_have_read_it() -> None:
    leases, claims = Leases(10), [Claim() for _ in range(4)]
    assert leases.room() == 10
    leases.hold(claims[0], b"last", {"kv", "indexer"}, 6, now_s=0)
    leases.read("kv", [b"first", b"last"])
    assert (claims[0].released, leases.size, leases.room()) == (0, 6, 4)
    leases.read("indexer", [b"last"])
    assert (claims[0].released, leases.size, len(leases)) == (1, 0, 0)
    # Two requests with the same prefix: each is read separately.
    leases.hold(claims[1], b"last", {"kv", "indexer"}, 4, now_s=1)
    leases.hold(claims[2], b"last", {"kv", "indexer"}, 4, now_s=2)
    assert (claims[1].released, claims[2].released, leases.size, len(leases)) == (0, 0, 8, 2)
    leases.read("kv", [b"last"])
    leases.read("kv", [b"last"])
    leases.read("indexer", [b"last"])
    assert (claims[1].released, claims[2].released, leases.size, len(leases)) == (1, 0, 4, 1)
    # Never read.
    assert leases.expire(2 + LEASE_S - 0.1) == 0
    assert leases.expire(2 + LEASE_S) == 1
    leases.hold(claims[3], b"other", {"kv"}, 1, now_s=3)
    leases.clear()
    assert [claim.released for claim in claims] == [1, 1, 1, 1]
    assert leases.size == 0


def test_hashes_stay_as_they_are() -> None:
    """Another hash finds nothing that earlier versions have stored: then increment ``FORMAT``."""
    assert facts.FORMAT == 1
    assert [one.hex() for one in page_hashes(["0" * 64])] == ["b9a39ca08b725e138fa667c453a626ba"]
    assert len(set(page_hashes(["a", "b", "a_0"]))) == 3
    assert {len(one) for one in page_hashes(["a", "é" * 100])} == {HASH_BYTES}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """State of the running SGLang, which tests change."""
    says = SimpleNamespace(arguments=None, adapters=True)
    monkeypatch.setattr(engine, "server_arguments", lambda: says.arguments)
    monkeypatch.setattr(engine, "sglang_version", lambda: "0.5.23")
    monkeypatch.setattr(engine, "hashes_know_adapters", lambda: says.adapters)
    return says


OPTIONS = Options(read_extra_config(V1).config)


def described(
    told: SimpleNamespace, model: Model, pool: Any = None, name: str = "kv", options: Options = OPTIONS, **storage: Any
) -> str:
    told.arguments = model.make()
    pages = Pages.of(pool or MHATokenToKVPoolHost(), name)
    assert pages is not None
    return repr(facts.pool_facts(facts.engine_facts(options), name, pages, Storage({}, **storage)))


def test_everything_that_changes_bytes_is_in_the_namespace(told: SimpleNamespace, tmp_path: Path) -> None:
    """One model's KV is never used for another (P8)."""

    def model(seed: int = 0, **arguments: Any) -> Model:
        return Model(tmp_path / "model", seed, arguments)

    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    versions = [Options(OPTIONS.config, "v2"), Options(OPTIONS.config, salt="tenant")]
    found = [
        described(told, model()),
        described(told, model(seed=1)),
        described(told, model(dtype="float16")),
        described(told, model(kv_cache_dtype="fp8_e5m2")),
        described(told, model(quantization="fp8")),
        described(told, model(json_model_override_args='{"rope_theta": 1}')),
        described(told, model(attention_backend="triton")),
        described(told, model(context_length=4096)),
        described(told, model(weight_version="two")),
        described(told, model(quantization_param_path=str(scales))),
        described(told, model(speculative_draft_model_path=str(tmp_path / "model"))),
        *(described(told, model(), options=one) for one in versions),
        described(told, model(), MHATokenToKVPoolHost(dtype="float16")),
        described(told, model(), MHATokenToKVPoolHost(page_size=8)),
        described(told, model(), MHATokenToKVPoolHost("page_first_direct")),
        described(told, model(), MLATokenToKVPoolHost()),
        described(told, model(), name="swa"),
        described(told, model(), tp_rank=0, tp_size=2),
        described(told, model(), tp_rank=1, tp_size=2),
        described(told, model(), pp_rank=1, pp_size=2),
        described(told, model(), attn_cp_rank=1, attn_cp_size=2),
    ]
    assert len(set(found)) == len(found)


def test_what_does_not_change_bytes_is_not_in_the_namespace(told: SimpleNamespace, tmp_path: Path) -> None:
    here = described(told, Model(tmp_path / "here"))
    assert described(told, Model(tmp_path / "there")) == here
    assert described(told, Model(tmp_path / "here"), dp_rank=1) == here
    assert described(told, Model(tmp_path / "here"), model_name="served under another name") == here
    both = [
        described(told, Model(tmp_path / "here"), MHATokenToKVPoolHost(one))
        for one in ("layer_first", "page_first_direct")
    ]
    assert both[0] == both[1]


def test_ranks_share_what_is_the_same_on_all_of_them(told: SimpleNamespace, tmp_path: Path) -> None:
    model = Model(tmp_path / "model")

    def ranks(pool: Any, name: str = "kv") -> int:
        found = {described(told, model, pool, name, tp_rank=rank, tp_size=2, is_mla_model=True) for rank in range(2)}
        return len(found)

    assert ranks(MLATokenToKVPoolHost()) == 1
    assert ranks(IndexerPoolHost(), "indexer") == 1
    # State, and a draft with heads, differ by rank, and only rank 0 writes the draft.
    assert ranks(MLATokenToKVPoolHost(), "mamba") == 2
    assert ranks(MHATokenToKVPoolHost(), "draft") == 2


def test_weights_that_nothing_names_are_refused(told: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--load-format dummy.*set weights_version"):
        described(told, Model(tmp_path / "model", arguments={"load_format": "dummy"}))
    with pytest.raises(ConfigError, match=r"no files of its weights.*set weights_version"):
        described(told, Model(tmp_path / "model", arguments={"model_path": "nobody/nothing"}))
    named = Options(OPTIONS.config, "v1")
    described(told, Model(tmp_path / "model", arguments={"load_format": "dummy"}), options=named)


def test_a_trainers_weights_are_refused_unless_they_have_a_name_of_their_own(
    told: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two training runs begin with the same files, and both count their updates from 1 (P8)."""
    model = Model(tmp_path / "model", arguments={"weight_version": "default"})
    serving = SimpleNamespace(weight_version="default")
    context = ModuleType("sglang.srt.runtime_context")
    context.get_serving = lambda: serving  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, context.__name__, context)
    start = described(told, model)
    serving.weight_version = "1"
    with pytest.raises(ConfigError, match=r"weight_version '1'.*set weights_version"):
        described(told, model)
    first, second = (described(told, model, options=Options(OPTIONS.config, run)) for run in ("first", "second"))
    serving.weight_version = "2"
    later = described(told, model, options=Options(OPTIONS.config, "first"))
    assert len({start, first, second, later}) == 4


def test_adapters_are_known_by_their_files(told: SimpleNamespace, tmp_path: Path) -> None:
    def with_adapter(seed: int, form: Any) -> str:
        Model(tmp_path / "adapter", seed).make()
        (tmp_path / "adapter" / "adapter_config.json").write_text('{"lora_alpha": 16}')
        return described(told, Model(tmp_path / "model", arguments={"enable_lora": True, "lora_paths": form}))

    path = str(tmp_path / "adapter")
    forms = [
        [SimpleNamespace(lora_name="one", lora_path=path)],
        [f"one={path}"],
        {"one": path},
        [{"lora_name": "one", "lora_path": path}],
    ]
    assert len({with_adapter(0, form) for form in forms}) == 1
    assert with_adapter(0, forms[0]) != with_adapter(1, forms[0])
    assert described(told, Model(tmp_path / "model", arguments={"enable_lora": True})) != described(
        told, Model(tmp_path / "model")
    )
    with pytest.raises(ConfigError, match=r"adapter two: .*no files of it"):
        with_adapter(0, {"two": str(tmp_path / "nowhere")})
    told.adapters = False
    with pytest.raises(ConfigError, match="leaves a request's LoRA adapter out"):
        with_adapter(0, forms[0])


def test_an_adapter_s_scale_is_in_the_namespace(told: SimpleNamespace, tmp_path: Path) -> None:
    """SGLang scales by ``lora_alpha / r`` of the configuration, and identifies the adapter by its name and path."""
    Model(tmp_path / "adapter").make()
    model = Model(tmp_path / "model", arguments={"enable_lora": True, "lora_paths": {"one": str(tmp_path / "adapter")}})

    def scaled(alpha: int) -> str:
        (tmp_path / "adapter" / "adapter_config.json").write_text(f'{{"r": 8, "lora_alpha": {alpha}}}')
        return described(told, model)

    assert scaled(16) == scaled(16)
    assert scaled(16) != scaled(32)


def test_two_gguf_files_in_one_directory_are_two_models(told: SimpleNamespace, tmp_path: Path) -> None:
    def of(name: str) -> str:
        file = str(tmp_path / "model" / name)
        return described(told, Model(tmp_path / "model", arguments={"model_path": file, "quantization": "gguf"}))

    (tmp_path / "model").mkdir()
    for name, value in (("m-Q4_K.gguf", 4), ("m-Q8_0.gguf", 8)):
        (tmp_path / "model" / name).write_bytes(bytes([value]) * 512)
    assert of("m-Q4_K.gguf") != of("m-Q8_0.gguf")
    before = of("m-Q4_K.gguf")
    (tmp_path / "model" / "m-Q8_0.gguf").write_bytes(bytes(512))
    assert of("m-Q4_K.gguf") == before


def test_experts_of_other_files_are_in_the_namespace(told: SimpleNamespace, tmp_path: Path) -> None:
    experts = tmp_path / "experts" / "_layer_0"

    def with_experts(path: str = str(tmp_path / "experts"), options: Options = OPTIONS, **arguments: Any) -> str:
        arguments = {"kt_weight_path": path, "kt_method": "AMXINT4", **arguments}
        return described(told, Model(tmp_path / "model", arguments=arguments), options=options)

    with pytest.raises(ConfigError, match=r"--kt-weight-path .*set weights_version"):
        with_experts()
    experts.mkdir(parents=True)
    (experts / "INT4_down_0_.kt").write_bytes(bytes(512))
    found = [described(told, Model(tmp_path / "model")), with_experts(), with_experts(kt_method="AMXINT8")]
    found.append(with_experts(kt_num_gpu_experts=4))
    (experts / "INT4_down_0_.kt").write_bytes(b"\1" * 512)
    found.append(with_experts())
    assert len(set(found)) == len(found)
    with_experts(str(tmp_path / "nowhere"), Options(OPTIONS.config, "v1"))
    # Without experts of their own the method means nothing, and namespaces stay the same.
    assert described(told, Model(tmp_path / "model", arguments={"kt_method": "AMXINT4"})) == found[0]


def test_both_types_of_a_state_are_in_the_namespace(told: SimpleNamespace, tmp_path: Path) -> None:
    """The pool's own ``dtype`` is that of one half only; bfloat16 and float16 have the same sizes."""

    def state(**types: str) -> str:
        pool = IndexerPoolHost()
        pool.__dict__.update({"conv_dtype": "torch.bfloat16", "temporal_dtype": "torch.bfloat16"} | types)
        return described(told, Model(tmp_path / "model"), pool, "mamba")

    assert len({state(), state(temporal_dtype="torch.float16"), state(conv_dtype="torch.float16")}) == 3


def test_pages_in_pieces_of_several_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="tp_lcm_size"):
        facts.refuse_unsupported(Storage({}, tp_lcm_size=8))
    facts.refuse_unsupported(Storage({}))


def test_a_draft_with_heads_beside_latent_attention_is_refused() -> None:
    """Only rank 0 of SGLang writes it, and the ranks' lengths are intersected: never a hit."""
    two = Storage({}, is_mla_model=True, tp_size=2)
    with pytest.raises(ConfigError, match=r"pool draft: .*--tp-size 1"):
        facts.refuse_pool("draft", MHATokenToKVPoolHost(), two)
    for pool, storage in (
        (MHATokenToKVPoolHost(), Storage({}, is_mla_model=True)),
        (MHATokenToKVPoolHost(), Storage({}, tp_size=2)),
        (MLATokenToKVPoolHost(), two),
        (IndexerPoolHost(), two),
    ):
        facts.refuse_pool("draft", pool, storage)


@pytest.mark.parametrize(
    ("ranks", "arguments", "storage"),
    [
        (1, {}, {}),
        (8, {"tp_size": 4, "pp_size": 2}, {"tp_size": 4, "pp_size": 2}),
        (8, {"tp_size": 16, "nnodes": 2}, {"tp_size": 16}),
        (8, {"tp_size": 4, "dp_size": 2}, {"tp_size": 4}),
        (8, {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, {}),
        (4, {}, {"tp_size": 2, "attn_cp_size": 2}),
    ],
)
def test_ranks_of_a_node(ranks: int, arguments: dict[str, Any], storage: dict[str, Any]) -> None:
    assert engine.ranks_of_node(SimpleNamespace(**arguments), Storage({}, **storage)) == ranks


def test_releases_tell_themselves_in_different_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **members: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, made)

    def retired() -> None:
        raise RuntimeError("get_global_server_args() is retired")

    old = SimpleNamespace(model_path="old", attention_backend="triton", weight_version="1")
    module("sglang.srt.runtime_context")
    module("sglang.srt.mem_cache.utils")
    module("sglang.srt.server_args", get_global_server_args=lambda: old)
    assert engine.server_arguments() is old
    assert engine.attention_backends(old) == ["triton", "", ""]
    assert (engine.model_path(old), engine.weight_version(old)) == ("old", "1")
    assert not engine.hashes_know_adapters()
    # 0.5.23: effective values differ from requested ones, and an in-place update is visible.
    new = SimpleNamespace(model_path="new", attention_backend=None, weight_version="default")
    serving, model = SimpleNamespace(weight_version="2"), SimpleNamespace(model_path="newer")
    module(
        "sglang.srt.runtime_context",
        get_server_args=lambda: new,
        get_exec=lambda: SimpleNamespace(kernel=SimpleNamespace(attention_backend="fa3")),
        get_serving=lambda: serving,
        get_model=lambda: model,
    )
    module("sglang.srt.mem_cache.utils", storage_namespace_seed=lambda: None)
    module("sglang.srt.server_args", get_global_server_args=retired)
    assert engine.server_arguments() is new
    assert engine.attention_backends(new) == ["fa3", "", ""]
    assert (engine.model_path(new), engine.weight_version(new)) == ("newer", "2")
    assert engine.weight_version_of_start(new) == "default"
    assert engine.hashes_know_adapters()
    before = engine.current_weights(new)
    model.model_path = "another"
    assert engine.current_weights(new) != before
    # Neither way exists.
    module("sglang.srt.runtime_context")
    monkeypatch.setattr(engine, "sglang_version", lambda: "9.9")
    with pytest.raises(ConfigError, match=r"9\.9 does not report its arguments"):
        engine.server_arguments()


def test_a_configuration_of_an_early_release(told: SimpleNamespace, tmp_path: Path) -> None:
    """0.5.4 to 0.5.8 know fewer ranks: a missing one is a single rank."""
    told.arguments = Model(tmp_path / "model").make()
    pages = Pages.of(MHATokenToKVPoolHost(), "kv")
    assert pages is not None
    early = SimpleNamespace(tp_rank=0, tp_size=1, is_mla_model=False)
    made = facts.engine_facts(OPTIONS)
    assert facts.pool_facts(made, "kv", pages, early) == facts.pool_facts(made, "kv", pages, Storage({}))
    facts.refuse_unsupported(early)


class Series:
    """A counter of Prometheus with the label ``name``."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.name, self.broken = "", False

    def labels(self, name: str) -> "Series":
        self.name = name
        return self

    def inc(self, count: int) -> None:
        if self.broken:
            raise OSError("the disk is full")
        self.values[self.name] = self.values.get(self.name, 0) + count


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    caplog.clear()
    return lines


def test_counts_are_logged_once_a_minute_if_there_are_new_ones(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang.kvdepot")
    now_s = [100.0]
    counts = report.Report(clock=lambda: now_s[0])
    counts.add("asked", 5)
    counts.add("not_leased", 2)
    now_s[0] += report.SAY_S - 1
    counts.add("hit", 3)
    assert said(caplog) == []
    now_s[0] += 1
    counts.trouble("no_depot", "no depot answers", 4)
    assert said(caplog) == ["kvdepot: in the last 60 s: asked 5, hit 3, no_depot 4, not_leased 2"]
    counts.say()
    assert said(caplog) == []
    now_s[0] += 3600
    counts.add("asked")
    counts.add("hit", 0)
    assert said(caplog) == ["kvdepot: in the last 3600 s: asked 1"]


def test_counts_are_in_sglangs_metrics_if_it_has_any(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    series, made = Series(), []
    module = ModuleType("prometheus_client")
    module.Counter = lambda *about: made.append(about) or series  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "prometheus_client", module)
    report._series.cache_clear()
    report.report_for(SimpleNamespace()).add("asked", 1)
    # A storage backend that is attached again: Prometheus refuses a second series of the same name.
    faces = [report.report_for(SimpleNamespace(enable_metrics=True)) for _ in range(2)]
    report._series.cache_clear()
    faces[0].add("asked", 3)
    faces[1].trouble("not_leased", "no room", 2)
    faces[1].add("asked", 4)
    assert series.values == {"asked": 7, "not_leased": 2}
    assert [(name, labels) for name, _, labels in made] == [("sglang:kvdepot_counts", ["name"])]
    series.broken = True
    for _ in range(2):
        faces[0].add("asked", 1)
    assert faces[0].snapshot() == {"asked": 5}
    assert sum("not in SGLang's metrics" in record.getMessage() for record in caplog.records) == 1
