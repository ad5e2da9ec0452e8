"""An engine's KV cache as vLLM's GPU runner creates it, without a GPU: vLLM's own functions in the engine's order.

Everything that determines the cache is real: backends, specs, groups, the layout, the configuration, kernel block
sizes, allocation and views. The model with its weights, the process groups, and the memory (``memory``) are stand-ins.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import planted

planted.plant()

import torch  # noqa: E402
from cases import Case  # noqa: E402
from families import FAMILIES, Asker, Layer, Layers  # noqa: E402
from vllm.config import CacheConfig  # noqa: E402
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout  # noqa: E402
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs  # noqa: E402
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402
from vllm.v1.worker import utils as worker_utils  # noqa: E402
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache, prepare_kernel_block_sizes  # noqa: E402

from kvdepot.engines.vllm.groups import Geometry, geometry  # noqa: E402
from kvdepot.engines.vllm.pages import GroupPages, group_pages  # noqa: E402

planted.plant_kernels()

REQUEST_TOKENS = 16
"""The longest request: vLLM refuses a cache that does not hold one."""


def vllm_config(case: Case) -> Any:
    """The part of a ``VllmConfig`` that is read, with a real cache configuration."""
    cache = CacheConfig(block_size=case.block, cache_dtype=case.cache_dtype, num_gpu_blocks_override=case.blocks)
    cache.mamba_block_size, cache.mamba_cache_mode = case.block, case.states
    length = REQUEST_TOKENS
    hf_config = SimpleNamespace(model_type="tiny", to_dict=lambda: {"family": case.family})
    model = SimpleNamespace(
        architecture="TinyForCausalLM",
        model="/nowhere/model",
        revision=None,
        hf_config=hf_config,
        hf_text_config=hf_config,
        dtype=torch.bfloat16,
        quantization=None,
        max_model_len=length,
        original_max_model_len=length,
        pooler_config=None,
        is_prefix_caching_supported=True,
        multimodal_config=None,
        quantization_config=None,
        model_class_overrides=None,
        use_mla="DeepSeek" in case.family,
    )
    return SimpleNamespace(
        cache_config=cache,
        model_config=model,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=case.tp,
            pipeline_parallel_size=case.pp,
            decode_context_parallel_size=case.dcp,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
        ),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=not case.hybrid, max_num_encoder_input_tokens=REQUEST_TOKENS
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        kernel_config=SimpleNamespace(),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        speculative_config=None,
        kv_transfer_config=None,
        max_in_flight_tokens=REQUEST_TOKENS,
        num_prefill_lookahead_tokens=0,
        num_speculative_tokens=0,
    )


@dataclass
class Worker:
    """One pipeline stage's cache."""

    config: KVCacheConfig
    kernel_blocks: list[int]
    views: dict[str, torch.Tensor]

    def pages(self, layer_names: tuple[str, ...], layerwise: bool = True) -> GroupPages:
        """Our pages of a group."""
        return group_pages(layer_names, self.views, self.config.num_blocks, layerwise)


@dataclass
class Engine:
    """One case, with real objects."""

    case: Case
    vllm_config: Any
    layout: KVCacheLayout
    layers: Layers
    workers: list[Worker]
    scheduler_config: KVCacheConfig

    def geometry(self, config: KVCacheConfig) -> Geometry:
        """Our geometry of the case."""
        return geometry(self.vllm_config, config)

    def backends(self, layer_names: tuple[str, ...]) -> str:
        """Names of the layers' backends, as the connector spells them."""
        found = {self.layers[name].backend for name in layer_names} - {None}  # a state's backend is not asked
        return "+".join(sorted(f"{backend.__module__}.{backend.__qualname__}" for backend in found))


Zeros = Callable[[int], torch.Tensor]


def host_memory(size: int) -> torch.Tensor:
    """Memory of this process."""
    return torch.zeros(size, dtype=torch.int8)


def build(case: Case, zeros: Zeros = host_memory) -> Engine:
    """Creates an engine's cache; ``zeros`` allocates its memory."""
    with planted.device(case.capability):
        config = vllm_config(case)
        asker = Asker(case, config)
        layers = _with_states_padded(config, FAMILIES[case.family](asker))
        _name_heads(config.model_config, asker.total_heads)
        stages = _stages(layers, case.pp)
        layout = _layout(case, config, layers)
        # `EngineCore._initialize_kv_caches`.
        specs = [{name: layer.spec for name, layer in stage.items()} for stage in stages]
        configs = get_kv_cache_configs(config, specs, [1 << 40] * len(specs))
        for one in configs:
            one.kv_cache_layout = config.cache_config.kv_cache_layout
        scheduler_config = generate_scheduler_kv_cache_config(configs)
        workers = [_worker(one, layers, layout, zeros) for one in configs]
    return Engine(case, config, layout, layers, workers, scheduler_config)


def _name_heads(model: Any, heads: int) -> None:
    """Gives the model's configuration the heads of the layers that were created."""
    model.get_total_num_kv_heads = lambda: heads
    named = {**model.hf_config.to_dict(), "num_key_value_heads": heads}
    model.hf_config.to_dict = lambda: named


def _stages(layers: Layers, count: int) -> list[Layers]:
    names = list(layers)
    cuts = [len(names) * stage // count for stage in range(count + 1)]
    return [{name: layers[name] for name in names[begin:end]} for begin, end in itertools.pairwise(cuts)]


def _layout(case: Case, config: Any, layers: Layers) -> KVCacheLayout:
    """Resolves the layout as the engine core does, from what workers report of their backends."""
    backends = {layer.backend for layer in layers.values() if layer.backend is not None}
    names = [layout.name for layout in get_supported_kv_cache_layouts(sorted(backends, key=str))]
    with mock.patch.dict(os.environ):
        os.environ.pop("VLLM_KV_CACHE_LAYOUT", None)
        if case.layout is not None:
            os.environ["VLLM_KV_CACHE_LAYOUT"] = case.layout
        return resolve_kv_cache_layout(config, [names], [layer.spec for layer in layers.values()])


def _with_states_padded(config: Any, layers: Layers) -> Layers:
    """Pads states to attention's page, which `Platform._align_hybrid_block_size` does by the model's class."""
    pages = [layer.spec.page_size_bytes for layer in layers.values() if not isinstance(layer.spec, MambaSpec)]
    config.cache_config.mamba_page_size_padded = max(pages)
    return {
        name: Layer(_padded(layer.spec, max(pages)), layer.backend) if isinstance(layer.spec, MambaSpec) else layer
        for name, layer in layers.items()
    }


def _padded(spec: MambaSpec, page_bytes: int) -> MambaSpec:
    return replace(spec, page_size_padded=page_bytes)


def _worker(config: KVCacheConfig, layers: Layers, layout: KVCacheLayout, zeros: Zeros) -> Worker:
    """Does the same as `GPUModelRunner.initialize_kv_cache`."""
    groups = [_attention_groups(index, group, layers) for index, group in enumerate(config.kv_cache_groups)]
    kernel_blocks = prepare_kernel_block_sizes(config, groups)
    with _memory_from(zeros):
        views = allocate_kv_cache(config, torch.device("cpu"), layout, kernel_blocks)
    return Worker(config, kernel_blocks, views)


def _attention_groups(index: int, group: KVCacheGroupSpec, layers: Layers) -> list[AttentionGroup]:
    """`GPUModelRunner.initialize_attn_backend`: one attention group for each backend and spec of a cache group."""
    found: dict[Any, list[str]] = {}
    for name in group.layer_names:
        found.setdefault((layers[name].backend, layers[name].spec), []).append(name)
    return [AttentionGroup(backend, names, spec, index) for (backend, spec), names in found.items()]


@contextlib.contextmanager
def _memory_from(zeros: Zeros) -> Iterator[None]:
    """Within the context, vLLM's allocations for the cache come from ``zeros``."""
    made = lambda size, **kwargs: zeros(size)  # noqa: E731
    with mock.patch.object(worker_utils, "torch", _Torch(made)):
        yield


class _Torch:
    """torch with another ``zeros``."""

    def __init__(self, zeros: Callable[..., torch.Tensor]) -> None:
        self.zeros = zeros

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
