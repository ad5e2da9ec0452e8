"""Unsupported caches are refused with a reason, whatever the groups consist of."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cache_lab import vllm_config
from cases import LLAMA, Case
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvdepot.engines.vllm.groups import Geometry, geometry

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 64, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**SIZES)
MAMBA = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
ALIGNED = replace(MAMBA, mamba_cache_mode="align")


def read(*groups: Any, pcp: int = 1) -> Geometry:
    """Returns the connector's geometry of these groups."""
    config = vllm_config(Case(LLAMA, "FLASH_ATTN"))
    config.parallel_config.prefill_context_parallel_size = pcp
    made = [
        group if isinstance(group, KVCacheGroupSpec) else KVCacheGroupSpec([f"layers.{index}"], group)
        for index, group in enumerate(groups)
    ]
    return geometry(config, KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=made))


def mixed(*specs: Any) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={f"layers.{i}": spec for i, spec in enumerate(specs)})


REFUSED = {
    "no cache": ((), "no KV cache"),
    "states that are not kept": ((FULL, MAMBA), "--mamba-cache-mode none"),
    "states of every block": ((FULL, replace(MAMBA, mamba_cache_mode="all")), "--mamba-cache-mode all"),
    "states beside drafts": ((FULL, replace(ALIGNED, num_speculative_blocks=1)), "speculative decoding"),
    "states alone": ((ALIGNED,), "states only"),
    "cross attention": ((FULL, CrossAttentionSpec(**SIZES)), "CrossAttentionSpec is not stored"),
    "recycled windows": ((RSWASpec(**SIZES, rswa_window=64),), "recycled"),
    "one of them recycled": ((mixed(FULL, RSWASpec(**SIZES, rswa_window=64)),), "recycled"),
    "two windows": (
        (mixed(SlidingWindowSpec(**SIZES, sliding_window=64), SlidingWindowSpec(**SIZES, sliding_window=128)),),
        "different windows",
    ),
    "rings alone": ((CircularBufferSpec(**SIZES),), "by its hash"),
    "HiSparse": (
        (
            KVCacheGroupSpec(
                ["layers.0"], MLAAttentionSpec(**SIZES), host_resident=True, role=KVCacheGroupRole.HISPARSE_SOURCE
            ),
            MLAAttentionSpec(**SIZES),
        ),
        "HiSparse",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_reason_is_said(name: str) -> None:
    groups, reason = REFUSED[name]
    found = read(*groups)
    assert reason in found.unsupported
    assert not found.groups


def test_prefill_context_parallelism_is_refused() -> None:
    assert "prefill context" in read(FULL, pcp=2).unsupported


@pytest.mark.parametrize(
    ("spec", "window"),
    [
        (FULL, 0),
        (FullAttentionSpec(**SIZES, sliding_window=64), 0),
        (FullAttentionSpec(**SIZES, attention_chunk_size=64), 0),
        (MLAAttentionSpec(**SIZES), 0),
        (HiddenStateCacheSpec(**SIZES), 0),
        (SlidingWindowSpec(**SIZES, sliding_window=1), 1),
        (SlidingWindowSpec(**SIZES, sliding_window=17), 1),
        (SlidingWindowSpec(**SIZES, sliding_window=18), 2),
        (SlidingWindowSpec(**SIZES, sliding_window=17, extra_retained_tokens=2), 2),
        (SlidingWindowMLASpec(**SIZES, sliding_window=128), 8),
        (ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=16), 1),
        (ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=64), 3),
        (ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=24), 1),
    ],
    ids=repr,
)
def test_windows_by_kind(spec: Any, window: int) -> None:
    (group,) = read(spec).groups
    assert group.window_blocks == window


def test_a_state_is_read_at_the_end_of_a_hit_only() -> None:
    full, state = read(FULL, ALIGNED).groups
    assert (full.keeps_state, full.window_blocks) == (False, 0)
    assert (state.keeps_state, state.window_blocks) == (True, 1)


def test_an_older_vllm_may_clear_what_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    monkeypatch.delattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids")
    assert "use 0.32 or later" in read(FULL, ALIGNED).unsupported
    assert not read(FULL).unsupported


def test_groups_that_vllm_rebuilds_by_itself_are_left_out() -> None:
    """Rings of DeepSeek V4.1, and windows that it replays."""
    replayed = SlidingWindowMLASpec(**SIZES, sliding_window=128, bounded_replay=True)
    found = read(CircularBufferSpec(**SIZES), FULL, replayed)
    assert [group.index for group in found.groups] == [1]


def test_a_vllm_without_recycled_windows_has_no_name_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1 import kv_cache_interface

    monkeypatch.delattr(kv_cache_interface, "RSWASpec")
    assert not read(FULL).unsupported
    assert isinstance(read(FULL).groups[0].spec, FullAttentionSpec)
