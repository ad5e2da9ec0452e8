"""Slices of KV heads over vLLM's own caches: blocks stored at one tensor-parallel size are loaded at others."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import checks
import pytest
import torch
from cache_lab import Engine, Worker, build
from cases import ALL_LAYOUTS, GEMMA, GPT_OSS, LLAMA, LLAMA4, V3, Case

from kvdepot._native import namespace_id
from kvdepot.engines.vllm.compute import NOW
from kvdepot.engines.vllm.facts import engine_facts, slice_facts
from kvdepot.engines.vllm.groups import Group
from kvdepot.engines.vllm.meta import Blocks
from kvdepot.engines.vllm.pages import GroupPages
from kvdepot.engines.vllm.placement import blocks_of
from kvdepot.engines.vllm.shares import Share
from kvdepot.engines.vllm.slices import HeadSlices, WholeError, same_on_all_ranks, slice_pages, slices_of
from kvdepot.engines.vllm.stores import GroupStore, Stored

FLASH = "FLASH_ATTN"
BASE = Case(LLAMA, FLASH, "LBNHC")
CASES = [
    *(Case(LLAMA, FLASH, layout) for layout in ALL_LAYOUTS),
    Case(LLAMA, "CPU_ATTN", None, 128),
    Case(LLAMA, "FLASHINFER", "LBNHC", 128),
    Case(LLAMA, "FLASHINFER", capability=10),
    Case(LLAMA, "TRITON_ATTN", None, 16),
    Case("MiMo-V2", "FLASH_ATTN_DIFFKV"),
    Case(GEMMA, FLASH, "BLHNC"),
    Case(GEMMA, FLASH, hybrid=False),
    Case(GPT_OSS, FLASH),
    Case(LLAMA4, FLASH),
]
PAGES = (1, 3, 4)


@dataclass
class RankCache:
    """One rank's cache of an engine, and one group of it as the connector holds it."""

    engine: Engine
    worker: Worker
    group: Group
    slices: HeadSlices
    held: list[Stored]

    @property
    def views(self) -> list[torch.Tensor]:
        """Returns [block, head, token, content] by layer, with the manager's blocks; writes go through."""
        found = []
        for name in self.group.layer_names:
            view = self.worker.views[name]
            blocks = view.unflatten(0, (self.worker.config.num_blocks, -1))
            # A block's kernel blocks hold its tokens in order.
            found.append(blocks.permute(0, 2, 1, 3, 4))
        return found

    def store(self, share: Share) -> GroupStore:
        owner = tuple(self.worker.views.values())
        return GroupStore.open(checks.depot(), self.held, checks.Options(), share, owner)  # type: ignore[arg-type]


def ranks_of(case: Case, wanted: int, group_number: int = -1, layerwise: bool = True) -> Iterator[RankCache]:
    """Yields all ranks of an engine, each with its own memory."""
    for rank in range(case.tp):
        engine = build(case)
        worker = engine.workers[0]
        group = checks.groups_of(engine, worker)[group_number]
        slices = slices_of(engine.vllm_config, group.spec, wanted, rank)
        facts = engine_facts(engine.vllm_config, worker.config)
        held = []
        for number, heads in slices.parts():
            pages = slice_pages(
                group.layer_names, worker.views, worker.config.num_blocks, layerwise, slices.rank_heads, heads
            )
            text = slice_facts(facts, group, pages, slices, number, engine.backends(pages.layer_names))
            held.append(Stored(text, pages, heads))
        yield RankCache(engine, worker, group, slices, held)


def logical(rank: RankCache, layer: int, page: int) -> torch.Tensor:
    """Returns a block's content for all heads of the model: [head, tokens' bytes]."""
    (_, kernel, _, tokens, content) = rank.views[layer].permute(0, 2, 1, 3, 4).shape
    size = tokens * kernel * content * rank.views[layer].element_size()
    generator = torch.Generator().manual_seed(100 * layer + page)
    shape = (rank.slices.all_heads, size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def of_rank(rank: RankCache, layer: int, page: int) -> torch.Tensor:
    """Returns the rank's heads of it, as its view has them."""
    view = rank.views[layer][page]
    first = rank.slices.first * rank.slices.slice_heads
    heads = logical(rank, layer, page)[first : first + rank.slices.rank_heads].contiguous()
    return heads.view(view.dtype).reshape(view.shape)


def fill(rank: RankCache) -> None:
    for layer, view in enumerate(rank.views):
        for page in PAGES:
            view[page] = of_rank(rank, layer, page)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def hashes(case: Case, salt: str) -> list[bytes]:
    import hashlib

    return [hashlib.sha256(f"{case}/{salt}/{page}".encode()).digest() for page in PAGES]


def through(task: Any) -> None:
    assert task.wait_done(checks.WAIT_MS)
    assert task.result().ok, task.result()


def moved(case: Case, ranks_before: int, ranks_after: int, layerwise: bool) -> None:
    """Dumps on an engine with some number of ranks, loads on one with another: every rank gets its heads of each
    block."""
    wanted, keys = 4, hashes(case, f"{ranks_before}/{layerwise}")
    for rank in ranks_of(replace(case, tp=ranks_before), wanted, layerwise=layerwise):
        fill(rank)
        store = rank.store(Share(rank.slices.replica, rank.slices.replicas))
        mine = store.share.of(Blocks(keys, list(PAGES)))
        through(store.dump(mine, NOW))
        store.close()
    for rank in ranks_of(replace(case, tp=ranks_after), wanted, layerwise=layerwise):
        store = rank.store(Share())
        through(store.load(Blocks(keys, list(PAGES)), NOW))
        for layer, view in enumerate(rank.views):
            for page in range(rank.worker.config.num_blocks):
                want = of_rank(rank, layer, page) if page in PAGES else torch.zeros_like(view[page])
                assert same_bytes(view[page], want), (rank.slices, layer, page)
        store.close()


@pytest.mark.parametrize("layerwise", [True, False], ids=["layers", "blocks"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_store_and_one_and_four_load(case: Case, layerwise: bool) -> None:
    moved(case, 2, 1, layerwise)
    moved(case, 2, 4, layerwise)


@pytest.mark.parametrize("layerwise", [True, False], ids=["layers", "blocks"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_and_four_ranks_store_and_two_load(case: Case, layerwise: bool) -> None:
    moved(case, 1, 2, layerwise)
    moved(case, 4, 2, layerwise)


@pytest.mark.parametrize("layerwise", [True, False], ids=["layers", "blocks"])
def test_more_ranks_than_heads_store_each_head_once(layerwise: bool) -> None:
    """Each rank with the same head dumps a share of the blocks, and all of them load it."""
    case = Case("MiMo-V2", "FLASH_ATTN_DIFFKV")
    ranks = list(ranks_of(replace(case, tp=8), 4))
    assert [(rank.slices.first, rank.slices.replica, rank.slices.replicas) for rank in ranks] == [
        (rank // 2, rank % 2, 2) for rank in range(8)
    ]
    moved(case, 8, 1, layerwise)
    moved(case, 2, 8, layerwise)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_slice_has_one_name_at_every_tensor_parallel_size(case: Case) -> None:
    def names(ranks: int) -> list[str]:
        return [
            namespace_id(stored.facts, stored.pages.layout.to_json())
            for rank in ranks_of(replace(case, tp=ranks), 4)
            for stored in rank.held
        ]

    assert len(set(names(1))) == 4
    assert names(1) == names(2) == names(4)


def test_what_changes_the_bytes_changes_a_slice_s_name() -> None:
    cases = [replace(BASE, layout=layout) for layout in ALL_LAYOUTS]
    cases += [replace(BASE, block=32), replace(BASE, pp=2), Case(LLAMA, "TRITON_ATTN", "LBNHC"), Case(GPT_OSS, FLASH)]
    named = [(case, wanted) for case in cases for wanted in (2, 4)]
    found = [
        namespace_id(stored.facts, stored.pages.layout.to_json())
        for case, wanted in named
        for rank in ranks_of(case, wanted)
        for stored in rank.held
    ]
    assert len(set(found)) == len(found) == 6 * len(cases)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case(LLAMA, FLASH, cache_dtype="fp8"), "quantised"),
        (Case(LLAMA, "TRITON_ATTN", cache_dtype="int8_per_token_head"), "quantised"),
        (Case(LLAMA, "FLASHINFER", cache_dtype="nvfp4", capability=10), "quantised"),
        (Case(LLAMA, "B12X", None, 64, capability=12), "packs the heads"),
        (Case(LLAMA, FLASH, tp=16, dcp=2), "context parallelism"),
        (Case(LLAMA, FLASH, tp=8), "use a multiple of 8"),
    ],
    ids=str,
)
def test_what_cannot_be_cut_by_heads_is_stored_by_rank(case: Case, why: str) -> None:
    with pytest.raises(WholeError, match=why):
        next(ranks_of(case, 4))


def test_heads_that_several_ranks_hold_are_cut_only_where_every_layer_has_as_many() -> None:
    """A layer with more KV heads than the model names also has one on each rank, but every rank has another one."""
    engine = build(Case("MiMo-V2", "FLASH_ATTN_DIFFKV", tp=8))
    (group,) = checks.groups_of(engine, engine.workers[0])
    assert slices_of(engine.vllm_config, group.spec, 4, 1).replicas == 2
    config = engine.vllm_config.model_config.hf_text_config
    named = {**config.to_dict(), "layers": [{"swa_num_key_value_heads": 8}]}
    config.to_dict = lambda: named
    with pytest.raises(WholeError, match="it is not known that every layer has 4 KV heads"):
        slices_of(engine.vllm_config, group.spec, 4, 1)


def test_quantised_weights_and_drafts_with_a_model_are_stored_by_rank() -> None:
    engine = build(BASE)
    (group,) = checks.groups_of(engine, engine.workers[0])
    config = engine.vllm_config
    config.speculative_config = SimpleNamespace(draft_model_config=config.model_config)
    slices_of(config, group.spec, 4, 0)  # n-grams
    config.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace())
    with pytest.raises(WholeError, match="a draft model"):
        slices_of(config, group.spec, 4, 0)
    config.speculative_config, config.model_config.quantization = None, "fp8"
    with pytest.raises(WholeError, match="scales of quantised weights"):
        slices_of(config, group.spec, 4, 0)


@pytest.mark.parametrize("case", [Case(V3, "FLASHMLA", None, 64, tp=8), Case(V3, "FLASHMLA", None, 64)], ids=str)
def test_latent_kv_is_known_to_be_the_same_on_all_ranks(case: Case) -> None:
    engine = build(case)
    (group,) = checks.groups_of(engine, engine.workers[0])
    assert same_on_all_ranks(group.spec)


def test_heads_are_not_known_to_be_the_same_on_all_ranks() -> None:
    engine = build(BASE)
    (group,) = checks.groups_of(engine, engine.workers[0])
    assert not same_on_all_ranks(group.spec)


# Mistakes that a round trip on one rank would not reveal.


def _next_slice(rank: RankCache) -> list[Stored]:
    """Mistakes a slice for another one, and writes it back where it was."""
    pages = [stored.pages for stored in rank.held]
    return [replace(stored, pages=other) for stored, other in zip(rank.held, [*pages[1:], pages[0]], strict=True)]


def _other_heads(rank: RankCache) -> list[Stored]:
    """Uses the heads of another slice for every second token."""
    first, second, *rest = rank.held
    runs = [list(zip(a, b, strict=True)) for a, b in zip(first.pages.shards, second.pages.shards, strict=True)]
    crossed = [
        GroupPages(
            one.layer_names,
            tuple(tuple(pair[(place + index) % 2] for index, pair in enumerate(shard)) for shard in runs),
            one.forms,
            one.page_count,
            one.cuda_device,
            whole_shards=True,
        )
        for place, one in enumerate((first.pages, second.pages))
    ]
    return [replace(first, pages=crossed[0]), replace(second, pages=crossed[1]), *rest]


def _layers_exchanged(rank: RankCache) -> list[Stored]:
    """Stores layers in another order than they are read in elsewhere."""
    return [replace(stored, pages=replace(stored.pages, shards=stored.pages.shards[::-1])) for stored in rank.held]


def _tokens_backwards(rank: RankCache) -> list[Stored]:
    """Stores the runs of a layer in another order than that of memory."""
    return [
        replace(stored, pages=replace(stored.pages, shards=tuple(shard[::-1] for shard in stored.pages.shards)))
        for stored in rank.held
    ]


@pytest.mark.parametrize("mistake", [_next_slice, _other_heads, _layers_exchanged, _tokens_backwards])
def test_the_self_test_finds_slices_that_come_back_to_the_wrong_place_on_other_ranks_only(mistake: Any) -> None:
    """In NHD a slice has one run per token; with each of these mistakes a whole page would still survive a round
    trip."""
    (rank,) = ranks_of(BASE, 2)
    wrong = mistake(rank)
    assert wrong != rank.held
    assert checks.self_test_ends(rank.engine, rank.worker, rank.group, *rank.held)
    assert not checks.self_test_ends(rank.engine, rank.worker, rank.group, *wrong)
    _comes_back(rank, wrong)


def _comes_back(rank: RankCache, held: list[Stored]) -> None:
    """A page survives a round trip through the depot: only the slices are wrong."""
    names = rank.held[0].pages.layer_names
    layers = blocks_of(names, rank.worker.views, rank.worker.config, rank.group.index)
    fill(rank)
    before = [layer[PAGES[0]].clone() for layer in layers]
    trial = [replace(stored, facts=json.dumps({**json.loads(stored.facts), "wrong": True})) for stored in held]
    store = GroupStore.open(checks.depot(), trial, checks.Options(), Share())  # type: ignore[arg-type]
    through(store.dump(Blocks([b"one"], [PAGES[0]]), NOW))
    for layer in layers:
        layer[PAGES[0]] = 0
    through(store.load(Blocks([b"one"], [PAGES[0]]), NOW))
    assert all(torch.equal(layer[PAGES[0]], was) for layer, was in zip(layers, before, strict=True))
    checks.depot().reset(store.namespaces)
    store.close()
