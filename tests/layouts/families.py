"""Cache specs of model families: their real sizes on one rank, and few of their layers.

vLLM's own layer class makes a layer's spec from the attributes that it reads; the layer itself, with its weights and
kernels, is a stand-in.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from cases import Case
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
from vllm.model_executor.layers.attention.cross_attention import CrossAttention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.worker.utils import customize_attention_spec


@dataclass(frozen=True)
class Layer:
    """A layer as the runner sees it: its cache spec, and the backend that made it; Mamba's backend is not asked."""

    spec: KVCacheSpec
    backend: Any = None


Layers = dict[str, Layer]


class Asker:
    """Asks vLLM's layer classes for specs, for one case."""

    def __init__(self, case: Case, config: Any) -> None:
        self.case, self.config = case, config
        self.backend = AttentionBackendEnum[case.backend].get_class()
        self.dtype = kv_cache_dtype_str_to_dtype(case.cache_dtype, config.model_config)
        self.total_heads = 1

    def heads(self, total: int) -> int:
        """Returns KV heads of one rank: with more ranks than heads each head is on several."""
        self.total_heads = total
        return max(1, total // self.case.tp)

    def _layer(self, spec: KVCacheSpec, backend: Any) -> Layer:
        # `GPUModelRunner.get_kv_cache_spec` does this to every attention layer.
        if isinstance(spec, AttentionSpec):
            spec = customize_attention_spec(backend, spec)
        return Layer(spec, backend)

    def attention(self, heads: int, size: int, size_v: int = 0, window: int | None = None) -> Layer:
        """`Attention`, with or without a sliding window."""
        layer = self._attributes(heads, size, size_v, sliding_window=window, attn_type=AttentionType.DECODER)
        return self._layer(Attention.get_kv_cache_spec(layer, self.config), self.backend)

    def chunked(self, heads: int, size: int, chunk: int) -> Layer:
        """`ChunkedLocalAttention`."""
        layer = self._attributes(heads, size, attention_chunk_size=chunk)
        return self._layer(ChunkedLocalAttention.get_kv_cache_spec(layer, self.config), self.backend)

    def cross(self, heads: int, size: int) -> Layer:
        """`CrossAttention` of a decoder."""
        layer = self._attributes(heads, size)
        return self._layer(CrossAttention.get_kv_cache_spec(layer, self.config), self.backend)

    def _attributes(self, heads: int, size: int, size_v: int = 0, **more: Any) -> Any:
        return SimpleNamespace(
            num_kv_heads=self.heads(heads),
            head_size=size,
            head_size_v=size_v or size,
            kv_cache_dtype=self.case.cache_dtype,
            kv_cache_torch_dtype=self.dtype,
            attn_backend=self.backend,
            **more,
        )

    def latent(self, size: int, sparse: bool = False) -> Layer:
        """`MLAAttention`; with an indexer of DSA it is sparse."""
        layer = SimpleNamespace(
            kv_cache_dtype=self.case.cache_dtype,
            head_size=size,
            sliding_window=None,
            indexer=object() if sparse else None,
            non_causal_multi_token_decode=False,
        )
        return self._layer(MLAAttention.get_kv_cache_spec(layer, self.config), self.backend)

    def indexer(self, size: int) -> Layer:
        """DSA's cache of the indexer's keys: fp8 with a four-byte scale per token."""
        layer = SimpleNamespace(cache_config=self.config.cache_config, head_dim=size + 4, dtype=torch.uint8)
        spec = DeepseekV32IndexerCache.get_kv_cache_spec(layer, self.config)
        return self._layer(spec, DeepseekV32IndexerBackend)

    def state(self, kind: str, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> Layer:
        """The state of a Mamba or linear attention layer."""
        layer = SimpleNamespace(
            get_state_shape=lambda: shapes,
            get_state_dtype=lambda: dtypes,
            mamba_type=MambaAttentionBackendEnum[kind],
            is_kv_cache_tp_replicated=False,
        )
        return Layer(MambaBase.get_kv_cache_spec(layer, self.config))


def decoder(pattern: list[Callable[[], Layer]], repeats: int, suffix: str = "self_attn.attn") -> Layers:
    """Returns the layers of a decoder whose kinds repeat as in ``pattern``."""
    made = [kind() for _ in range(repeats) for kind in pattern]
    return {f"model.layers.{index}.{suffix}": layer for index, layer in enumerate(made)}


def deepseek_v32(ask: Asker) -> Layers:
    """Sparse MLA, each layer with the cache of its indexer."""
    layers: Layers = {}
    for index in range(3):
        layers[f"model.layers.{index}.self_attn.attn"] = ask.latent(576, sparse=True)
        layers[f"model.layers.{index}.self_attn.indexer.k_cache"] = ask.indexer(128)
    return layers


def deepseek_v4(ask: Asker) -> Layers:
    """Windows, compressed latents with indexers, and the states of compressors: pages of many sizes in one block."""
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
    from vllm.models.deepseek_v4.compressor import CompressorBackend, CompressorStateCache
    from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend, DeepseekV4SWACache

    cache, packed = ask.config.cache_config, ask.case.cache_dtype
    layers: Layers = {}

    def add(index: int, name: str, kind: Any, backend: Any, **attributes: Any) -> None:
        spec = kind.get_kv_cache_spec(SimpleNamespace(cache_config=cache, **attributes), ask.config)
        layers[f"model.layers.{index}.attn.{name}"] = ask._layer(spec, backend)

    for index, ratio in enumerate((4, 128, 4, 128)):
        main = {"kv_cache_dtype": packed, "head_dim": 512, "kv_cache_torch_dtype": ask.dtype, "compress_ratio": ratio}
        window = {"window_size": 128, "head_dim": 512, "packed_bytes_per_token": 584, "packed_page_alignment": 576}
        swa = {**window, "block_size": 64, "dtype": torch.uint8, "bounded_replay": False}
        width = 512 * (2 if ratio == 4 else 1) * 2
        state = {"block_size": 4 if ratio == 4 else 8, "dtype": torch.float32, "state_dim": width}
        add(index, "main", DeepseekV4Attention, ask.backend, **main)
        add(index, "swa", DeepseekV4SWACache, DeepseekSparseSWABackend, **swa)
        add(index, "state", CompressorStateCache, CompressorBackend, sliding_window=ratio if ratio > 8 else 8, **state)
        if ratio == 4:
            keys = {"head_dim": 132, "dtype": torch.uint8, "compress_ratio": 4}
            add(index, "indexer", DeepseekV4IndexerCache, DeepseekV4IndexerBackend, **keys)
    return layers


def whisper(ask: Asker) -> Layers:
    """A decoder with attention to itself and to the encoder."""
    layers: Layers = {}
    for index in range(2):
        layers[f"model.decoder.layers.{index}.self_attn.attn"] = ask.attention(20, 64)
        layers[f"model.decoder.layers.{index}.encoder_attn.attn"] = ask.cross(20, 64)
    return layers


BF16, FP32 = torch.bfloat16, torch.float32


def qwen3_next(ask: Asker) -> Layers:
    """Three gated delta nets, then one full attention."""
    net = lambda: ask.state("GDN_ATTN", ((3, 8192), (32, 128, 128)), (BF16, BF16))  # noqa: E731
    return decoder([net, net, net, lambda: ask.attention(2, 256)], 1)


def nemotron_h(ask: Asker) -> Layers:
    """Mamba 2 with attention in between."""
    mamba = lambda: ask.state("MAMBA2", ((3, 9216), (128, 64, 128)), (BF16, FP32))  # noqa: E731
    return decoder([mamba, mamba, lambda: ask.attention(8, 128)], 1, "mixer")


def kimi_linear(ask: Asker) -> Layers:
    """Three delta attentions, then one latent attention."""
    state = lambda: ask.state("GDN_ATTN", ((3, 4096), (3, 4096), (3, 4096), (32, 128, 128)), (BF16, BF16, BF16, FP32))  # noqa: E731
    return decoder([state, state, state, lambda: ask.latent(576)], 1)


FAMILIES: dict[str, Callable[[Asker], Layers]] = {
    "Llama-3-8B": lambda ask: decoder([lambda: ask.attention(8, 128)], 2),
    "MiMo-V2": lambda ask: decoder([lambda: ask.attention(4, 192, 128)], 3),
    "Gemma3-27B": lambda ask: decoder(
        [*[lambda: ask.attention(16, 128, window=1024)] * 5, lambda: ask.attention(16, 128)], 2
    ),
    "gpt-oss-120b": lambda ask: decoder([lambda: ask.attention(8, 64, window=128), lambda: ask.attention(8, 64)], 2),
    "Llama4-Scout": lambda ask: decoder([*[lambda: ask.chunked(8, 128, 8192)] * 3, lambda: ask.attention(8, 128)], 2),
    "DeepSeek-V3": lambda ask: decoder([lambda: ask.latent(576)], 3),
    "DeepSeek-V3.2": deepseek_v32,
    "DeepSeek-V4": deepseek_v4,
    "Whisper-large": whisper,
    "Qwen3-Next": qwen3_next,
    "Nemotron-H": nemotron_h,
    "Kimi-Linear": kimi_linear,
}
