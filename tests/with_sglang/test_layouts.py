"""Every layout of SGLang's host pools, by SGLang's own classes, without an engine: pages come back whole (P1).

An engine on a CPU cannot have ``page_head`` (SGLang's kernels) and ``page_first_kv_split`` (Ascend's).
"""

import typing
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from conftest import model, settings
from sglang.srt.arg_groups.fields.memory import Memory
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.device_pool_info import MLASplitBuffers
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvdepot.engines import attachment
from kvdepot.engines.sglang import KVDepotHiCache, engine
from tools.lab.depot import DepotHome

PAGE, PAGES, LAYERS = 8, 12, 4
LATENT, ROPE, INDEX = 32, 8, 16
DEVICE = {
    "size": PAGE * PAGES,
    "page_size": PAGE,
    "dtype": torch.bfloat16,
    "device": "cpu",
    "layer_num": LAYERS,
    "enable_memory_saver": False,
}
HOST = {
    "host_to_device_ratio": 1.0,
    "host_size": 0,
    "page_size": PAGE,
    "pin_memory": False,
    "device_capacity_tokens": PAGE * PAGES,
    "start_layer": 0,
    "end_layer": LAYERS,
}
KEYS = [f"{number:064x}" for number in range(3)]
FROM, TO = (3, 4, 5), (8, 9, 2)
OPEN = Callable[[Any], KVDepotHiCache]


def plain(layout: str) -> Any:
    pool = memory_pool.MHATokenToKVPool(head_num=2, head_dim=16, **DEVICE)
    return MHATokenToKVPoolHost(pool.get_device_pool_infos()[0].buffer_info, layout=layout, **HOST)


def latent(layout: str) -> Any:
    pool = memory_pool.MLATokenToKVPool(kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, **DEVICE)
    info = pool.get_device_pool_infos()[0].buffer_info
    if layout == "page_first_kv_split":
        info = msgspec.structs.replace(info, buffers=split(), data_ptrs=None)
    return MLATokenToKVPoolHost(info, layout=layout, target_layer_num=LAYERS, **HOST)


def split() -> MLASplitBuffers:
    """The tensors of a pool of Ascend's, which keeps the parts of latent attention apart, with an indexer's beside."""

    def tensor(layers: int, width: int) -> torch.Tensor:
        return torch.zeros((layers, PAGES, PAGE, 1, width), dtype=torch.bfloat16)

    return MLASplitBuffers(
        k=tensor(LAYERS, LATENT),
        v=tensor(LAYERS, ROPE),
        index_k=tensor(2, INDEX),
        index_scales=None,
        index_layer_indices=(0, 2),
        k_width=LATENT,
        v_width=ROPE,
        index_width=INDEX,
    )


def tensors(pool: Any) -> list[torch.Tensor]:
    if pool.layout == "page_first_kv_split":
        return [pool.k_buffer, pool.v_buffer, pool.index_k_buffer]
    return [pool.kv_buffer]


def page(pool: Any, tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Returns a page's part of a tensor, by the dimensions that SGLang gives it."""
    first = (1 if isinstance(pool, MHATokenToKVPoolHost) else 0) + (pool.layout == "layer_first")
    by_token = pool.layout in ("layer_first", "page_first")
    begin, count = (number * PAGE, PAGE) if by_token else (number, 1)
    return tensor.narrow(first, begin, count)


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(number * PAGE, (number + 1) * PAGE) for number in pages])


@pytest.fixture
def opened(home: DepotHome, monkeypatch: pytest.MonkeyPatch) -> Iterator[OPEN]:
    """Opens backends over host pools; the engine's arguments are those of a tiny llama."""
    arguments = SimpleNamespace(model_path=model(), dtype="bfloat16", kv_cache_dtype="auto")
    monkeypatch.setattr(engine, "server_arguments", lambda: arguments)
    # Its start waits half a second for a depot: a busy machine may exceed that.
    monkeypatch.setattr(attachment, "GLANCE_MS", 60_000)
    made: list[KVDepotHiCache] = []

    def open_backend(pool: Any) -> KVDepotHiCache:
        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=isinstance(pool, MLATokenToKVPoolHost),
            enable_storage_metrics=False,
            is_page_first_layout=pool.layout != "layer_first",
            model_name="m",
            extra_config={"interface_v1": 1, **settings(home)},
        )
        made.append(KVDepotHiCache(config, {}))
        made[-1].register_mem_pool_host(pool)
        return made[-1]

    with home.start():
        yield open_backend
        for one in made:
            one.close()


POOLS = [
    *((plain, layout) for layout in ("layer_first", "page_first", "page_first_direct", "page_head")),
    *((latent, layout) for layout in ("layer_first", "page_first", "page_first_direct", "page_first_kv_split")),
]


def test_all_layouts_are_here() -> None:
    hint = typing.get_type_hints(Memory, include_extras=True)["hicache_mem_layout"]
    (choices,) = [arg.choices for arg in hint.__metadata__ if hasattr(arg, "choices")]
    assert {layout for _, layout in POOLS} == set(choices)


@pytest.mark.parametrize(("make", "layout"), POOLS)
def test_pages_of_every_layout_come_back(opened: OPEN, make: Callable[[str], Any], layout: str) -> None:
    pools = [make(layout), make(layout)]
    for number, (tensor, other) in enumerate(zip(*map(tensors, pools), strict=True)):
        generator = torch.Generator().manual_seed(number)
        tensor.copy_(torch.rand(tensor.shape, generator=generator).to(tensor.dtype))
        other.fill_(7)
    first, second = map(opened, pools)
    assert first.batch_set_v1(KEYS, indices(*FROM)) == [True] * 3
    assert second.batch_exists(KEYS) == 3
    assert second.batch_get_v1(KEYS, indices(*TO)) == [True] * 3
    for tensor, other in zip(*map(tensors, pools), strict=True):
        for source, target in zip(FROM, TO, strict=True):
            assert page(pools[0], tensor, source).equal(page(pools[1], other, target))
        for untouched in set(range(PAGES)) - set(TO):
            assert bool((page(pools[1], other, untouched) == 7).all())


@pytest.mark.parametrize("make", [plain, latent])
def test_layouts_with_the_same_order_of_bytes_share_pages_and_others_do_not(
    opened: OPEN, make: Callable[[str], Any]
) -> None:
    layouts = [layout for one, layout in POOLS if one is make]
    backends = {layout: opened(make(layout)) for layout in layouts}
    assert backends["layer_first"].batch_set_v1(KEYS, indices(*FROM)) == [True] * 3
    found = {layout: backend.batch_exists(KEYS) for layout, backend in backends.items()}
    assert found == {layout: 3 if layout in ("layer_first", "page_first_direct") else 0 for layout in layouts}
