"""The tier's namespace from vLLM's own configuration objects: no engine runs here."""

from types import SimpleNamespace
from typing import Any

import pytest
from engine_lab import Lab

from kvdepot.engines.offloading.facts import Engine, chunk_facts, refuse_unsupported, windowed_groups
from kvdepot.engines.offloading.options import RESETS, read_options
from kvdepot.errors import ConfigError

LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(4)]
TIER = {"pipeline": "Cache|Empty", "pool_gb": 0.25}


def facts(
    model: str, tier: dict[str, Any] | None = None, extra: dict[str, Any] | None = None, **arguments: Any
) -> dict[str, object]:
    """What an engine that is started so gives its chunks; ``extra``: of ``kv_connector_extra_config``."""
    import torch
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra or {}
    )
    chosen = {"dtype": "float32", "block_size": 32, **arguments}
    config = EngineArgs(model, kv_transfer_config=transfer, **chosen).create_engine_config()
    spec = FullAttentionSpec(block_size=chosen["block_size"], num_kv_heads=2, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(layer_names=LAYERS, kv_cache_spec=spec)]
    )
    cache.kv_cache_layout = "LBNHC"
    offloading = SimpleNamespace(config=build_offloading_config(config, cache), replicated_layout=False)
    return chunk_facts(offloading, Engine(config, cache), read_options({**TIER, **(tier or {})}))


def test_whatever_changes_a_chunk_s_bytes_is_another_namespace(lab: Lab) -> None:
    model = lab.model("llama")
    first = facts(model)
    assert facts(model) == first
    others = [
        facts(model, dtype="bfloat16"),
        facts(model, block_size=64),
        facts(model, extra={"blocks_per_chunk": 2}),
        facts(model, tensor_parallel_size=2),
        facts(model, kv_cache_dtype_skip_layers=["1"]),
        facts(model, kv_cache_dtype_skip_layers=["2"]),
        facts(model, hf_overrides={"rope_theta": 5}),
        facts(model, tier={"weights_version": "2"}),
        facts(model, tier={"adapters_version": "2"}),
        facts(lab.model("llama-one_kv_head")),
    ]
    texts = [str(one) for one in (first, *others)]
    assert len(set(texts)) == len(texts)


def test_how_much_memory_an_engine_has_changes_nothing(lab: Lab) -> None:
    model = lab.model("llama")
    assert facts(model, max_num_seqs=2, max_model_len=512) == facts(model, max_num_seqs=4)


def test_the_attention_backend_that_was_asked_for_is_a_fact(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    first = facts(lab.model("llama"))
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert facts(lab.model("llama")) != first


def test_weights_without_a_name_are_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match="weights_version"):
        facts(lab.model("llama"), load_format="dummy")
    assert facts(lab.model("llama"), {"weights_version": "1"}, load_format="dummy")["weights_declared"] == "1"


WINDOWED = ["SlidingWindowSpec", "ChunkedLocalAttentionSpec"]


def engine_of(lab: Lab, kind: str) -> Engine:
    """An engine with a group of full attention, and one of the given kind of cache."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1 import kv_cache_interface
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    windows = {
        "SlidingWindowSpec": {"sliding_window": 64},
        "ChunkedLocalAttentionSpec": {"attention_chunk_size": 64},
        "RSWASpec": {"rswa_window": 64},
    }
    form = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    spec = getattr(kv_cache_interface, kind)(**form, **windows.get(kind, {}))
    groups = [
        KVCacheGroupSpec(layer_names=LAYERS[:2], kv_cache_spec=FullAttentionSpec(**form)),
        KVCacheGroupSpec(layer_names=LAYERS[2:], kv_cache_spec=spec),
    ]
    config = EngineArgs(lab.model("llama"), dtype="float32").create_engine_config()
    return Engine(config, KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups))


@pytest.fixture(autouse=True)
def _fixed_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def test_full_attention_may_be_stored_in_every_way(lab: Lab) -> None:
    engine = engine_of(lab, "FullAttentionSpec")
    for reset in RESETS:
        refuse_unsupported(engine, read_options({**TIER, "on_reset": reset}), 4096, 4)
    assert windowed_groups(engine) == set()


@pytest.mark.parametrize("kind", WINDOWED)
def test_chunks_of_several_blocks_need_every_block(lab: Lab, kind: str) -> None:
    """vLLM offloads a chunk whose last block is there, also when a window has given back the others."""
    engine, options = engine_of(lab, kind), read_options(TIER)
    refuse_unsupported(engine, options, 4096, 1)
    with pytest.raises(ConfigError, match=f"4 GPU blocks, but {kind} .*blocks_per_chunk"):
        refuse_unsupported(engine, options, 4096, 4)
    assert windowed_groups(engine) == {1}


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_reset_keeps_no_namespace_of_windows(lab: Lab, kind: str) -> None:
    """After a reset vLLM offers chunks again whose blocks may belong to other requests."""
    options = read_options({**TIER, "on_reset": "keep"})
    with pytest.raises(ConfigError, match=f"on_reset: keep cannot be used with {kind}, "):
        refuse_unsupported(engine_of(lab, kind), options, 4096, 1)


@pytest.mark.parametrize("reset", RESETS)
def test_recycled_blocks_are_never_stored(lab: Lab, reset: str) -> None:
    """vLLM gives them to other requests, and may still store them as the first request's."""
    options = read_options({**TIER, "on_reset": reset})
    with pytest.raises(ConfigError, match=r"RSWASpec.*remove KVDepotTier"):
        refuse_unsupported(engine_of(lab, "RSWASpec"), options, 4096, 1)
