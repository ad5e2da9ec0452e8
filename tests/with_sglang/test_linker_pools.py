"""kvdepot's linker over SGLang's own device pools and classes, without an engine: models that a CPU does not run."""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import model, settings
from sglang.srt.mem_cache import memory_pool, swa_memory_pool
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from kvdepot.engines import attachment
from kvdepot.engines.sglang import KVDepotLinker, device_pools, engine
from kvdepot.errors import ConfigError
from tools.lab.depot import DepotHome

PAGE, PAGES, LAYERS = 8, 12, 4
UNTIL_S = 60.0
COMMON = {
    "page_size": PAGE,
    "dtype": torch.bfloat16,
    "device": "cpu",
    "enable_memory_saver": False,
}
HEADS = {"head_num": 2, "head_dim": 16}
LINKED = Callable[[Any], KVDepotLinker]


def plain() -> Any:
    return memory_pool.MHATokenToKVPool(size=PAGE * PAGES, layer_num=LAYERS, **COMMON, **HEADS)


def latent() -> Any:
    return memory_pool.MLATokenToKVPool(
        size=PAGE * PAGES, layer_num=LAYERS, kv_lora_rank=32, qk_rope_head_dim=8, **COMMON
    )


def windows() -> Any:
    return swa_memory_pool.SWAKVPool(
        size=PAGE * PAGES,
        size_swa=PAGE * PAGES,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1, 3],
        **COMMON,
        **HEADS,
    )


def tensors(pool: Any) -> list[torch.Tensor]:
    if isinstance(pool, swa_memory_pool.SWAKVPool):
        return [*tensors(pool.full_kv_pool), *tensors(pool.swa_kv_pool)]
    return list(pool.kv_buffer) if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


@pytest.fixture
def linked(home: DepotHome, monkeypatch: pytest.MonkeyPatch) -> Iterator[LINKED]:
    """Opens linkers over pools; the engine's arguments are those of a tiny llama."""
    arguments = SimpleNamespace(model_path=model(), dtype="bfloat16", kv_cache_dtype="auto")
    alone = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "dcp_size": 1,
    }
    monkeypatch.setattr(engine, "server_arguments", lambda: arguments)
    # SGLang knows its ranks in a scheduler only.
    monkeypatch.setattr(
        engine, "linker_ranks", lambda _, *, replicated: SimpleNamespace(**alone, is_mla_model=replicated)
    )
    # Its start waits half a second for a depot, and a hit one second for its pages: a busy machine may exceed both.
    monkeypatch.setattr(attachment, "GLANCE_MS", 60_000)
    keys = settings(home, load_policy="all")
    made: list[KVDepotLinker] = []

    def open_linker(pool: Any) -> KVDepotLinker:
        made.append(KVDepotLinker(arguments, params(pool), components={ComponentType.FULL}, extra_config=keys))
        return made[-1]

    with home.start():
        yield open_linker
        for one in made:
            one.close()


def params(pool: Any, **more: Any) -> Any:
    """The part of ``CacheInitParams`` that is used."""
    return SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        page_size=PAGE,
        **{"mtp_draft_device_pools": (), "sidecar_draft_device_pools": (), **more},
    )


def transfer(name: PoolName, keys: list[str], *pages: int, policy: Any = PoolHitPolicy.ALL_PAGES) -> PoolTransfer:
    indices = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages]) if pages else None
    return PoolTransfer(name=name, keys=keys, device_indices=indices, hit_policy=policy)


@pytest.mark.parametrize("make", [plain, latent, windows])
def test_pages_of_every_pool_come_back(linked: LINKED, make: Callable[[], Any]) -> None:
    pools = [make(), make()]
    for number, tensor in enumerate(tensors(pools[0])):
        generator = torch.Generator().manual_seed(number)
        tensor.copy_(torch.rand(tensor.shape, generator=generator).to(tensor.dtype))
    first, second = map(linked, pools)
    keys = [f"{number:064x}" for number in range(3)]

    def moved(linker: KVDepotLinker, *pages: int) -> list[PoolTransfer]:
        found = [transfer(PoolName.KV, keys, *pages)]
        if PoolName.SWA in linker.pools:
            found.append(transfer(PoolName.SWA, keys[1:], *pages[:2], policy=PoolHitPolicy.TRAILING_PAGES))
        return found

    assert first.offload(moved(first, 3, 4, 5))
    end_s = time.monotonic() + UNTIL_S
    while not first.num_completed_offloads():
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert first.pop_completed_offload()
    assert second.lookup("a", moved(second))[-1] == 3
    assert second.load("a", moved(second, 8, 9, 2))
    assert second.finish_layer_wise_loading(second.start_layer_wise_loading())
    for tensor, other in zip(tensors(pools[0]), tensors(pools[1]), strict=True):
        windowed = make is windows and any(tensor is one for one in tensors(pools[0].swa_kv_pool))
        for source, target in ((3, 8), (4, 9)) if windowed else ((3, 8), (4, 9), (5, 2)):
            assert tensor[source * PAGE : (source + 1) * PAGE].equal(other[target * PAGE : (target + 1) * PAGE])
    assert second.counts()["loaded"] == 5 if make is windows else 3


class OtherPool:
    """A pool of a class that SGLang's own helper does not know either."""


def changed(**attributes: Any) -> Any:
    pool = plain()
    for name, value in attributes.items():
        setattr(pool, name, value)
    return pool


@pytest.mark.parametrize(
    ("make", "more", "why"),
    [
        (plain, {"sidecar_draft_device_pools": (object(),)}, "draft"),
        (lambda: changed(kv_cache_layout="vectorized_5d"), {}, "layout is vectorized_5d"),
        (lambda: changed(k_scale_buffer=[torch.ones(1)]), {}, "scales"),
        (OtherPool, {}, "OtherPool"),
    ],
)
def test_pools_that_the_linker_cannot_read_are_refused(make: Callable[[], Any], more: dict[str, Any], why: str) -> None:
    pool = make()
    with pytest.raises(ConfigError, match=f"{why}.*use HiCache instead"):
        device_pools.device_pool_group(pool, params(pool, **more), {ComponentType.FULL})
