"""The checks of one case, and its row in the documentation."""

import itertools
import json
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import memory
import torch
from cache_lab import Engine, Worker, build, host_memory
from cases import Case
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MambaSpec, iter_layer_specs
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

import kvdepot
from kvdepot.engines.vllm.compute import ComputeOrder
from kvdepot.engines.vllm.facts import engine_facts, group_facts
from kvdepot.engines.vllm.groups import Geometry, Group
from kvdepot.engines.vllm.meta import Blocks
from kvdepot.engines.vllm.pages import GroupPages
from kvdepot.engines.vllm.placement import PlacementError
from kvdepot.engines.vllm.ranks import Rank
from kvdepot.engines.vllm.selftest import SelfTestError, self_test
from kvdepot.engines.vllm.shares import ALONE
from kvdepot.engines.vllm.stores import GroupStore, Stored

WAIT_MS = 60_000
COPIES = ((1, 3), (4, 2))
"""From one block to another."""

ONE_RANK = Rank(1, 0, 0)


@cache
def depot(copies: str = "auto") -> kvdepot.Depot:
    """The depot of all cases with one copy engine of devices, in this process."""
    config = {"mode": "embedded", "pipeline": "Cache", "pool_gb": 0.25, "timeout_ms": WAIT_MS, "copy_engine": copies}
    return kvdepot.attach(config)


class Options(SimpleNamespace):
    """The part of ``ConnectorOptions`` that copies need."""

    timeout_ms = WAIT_MS
    enable_event_sync = True


def facts_of(engine: Engine, worker: Worker, group: Group, pages: GroupPages, rank: Rank = ONE_RANK) -> str:
    """Facts of a group's namespace, as the connector writes them."""
    shared = engine_facts(engine.vllm_config, worker.config)
    return group_facts(shared, group, pages, rank, engine.backends(pages.layer_names))


def groups_of(engine: Engine, worker: Worker) -> list[Group]:
    """Groups of a worker that have layers."""
    found = engine.geometry(worker.config)
    assert not found.unsupported, found.unsupported
    return [group for group in found.groups if group.layer_names]


# Are the bytes correct?


def round_trip_problem(case: Case, layerwise: bool, device: memory.Standin | None = None, copies: str = "auto") -> str:
    """Dumps blocks and loads them into others. Returns what is wrong, or nothing.

    The expected result is that of vLLM's own copy of blocks; outside of the blocks that were loaded into, nothing may
    change.
    """
    engine = build(case, host_memory if device is None else device.zeros)
    for worker in engine.workers:
        for group in groups_of(engine, worker):
            pages = worker.pages(group.layer_names, layerwise)
            views = [worker.views[name] for name in group.layer_names]
            raw = _storage_bytes(views[0])
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(7)))
            before = raw.clone()
            wanted = _views_over(before.clone(), views)
            copy_kv_cache_blocks_inplace(wanted, worker.config.num_blocks, list(COPIES))
            touched = torch.zeros_like(before)
            for view in _views_over(touched, views):
                blocks = view.view(torch.uint8).unflatten(0, (worker.config.num_blocks, -1))
                blocks[[target for _, target in COPIES]] = 1
            where = pages if device is None else device.on_device(pages)
            _move(facts_of(engine, worker, group, pages), where, views, copies)
            for name, view, want in zip(group.layer_names, views, wanted, strict=True):
                if not torch.equal(view.view(torch.uint8), want.view(torch.uint8)):
                    return f"{name}: the bytes read back differ from those written"
            if not torch.equal(raw[touched == 0], before[touched == 0]):
                return f"{group.layer_names[0]}: bytes outside of the group's blocks have changed"
    return ""


def _move(facts: str, pages: GroupPages, owner: Any, copies: str) -> None:
    trial = json.dumps({**json.loads(facts), "round_trip": True})
    store = GroupStore.open(depot(copies), [Stored(trial, pages)], Options(), ALONE, owner)  # type: ignore[arg-type]
    hashes = [bytes([source] * 16) for source, _ in COPIES]
    now = ComputeOrder(event_sync=True).point()
    _through(store.dump(Blocks(hashes, [source for source, _ in COPIES]), now))
    _through(store.load(Blocks(hashes, [target for _, target in COPIES]), now))
    depot(copies).reset(store.namespaces)
    store.close()


def _through(task: Any) -> None:
    assert task.wait_done(WAIT_MS)
    assert task.result().ok, task.result()


def _storage_bytes(view: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())


def _views_over(storage: torch.Tensor, views: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the same views over other memory."""
    made = [torch.empty(0, dtype=view.dtype) for view in views]
    return [
        one.set_(storage.untyped_storage(), view.storage_offset(), view.shape, view.stride())
        for one, view in zip(made, views, strict=True)
    ]


# Does the self-test find wrong page arithmetic?


def _neighbours(pages: GroupPages, view: torch.Tensor) -> GroupPages:
    """Mistakes every block for the next one."""
    return _every_run(pages, lambda run: replace(run, base=run.base + run.stride))


def _half_apart(pages: GroupPages, view: torch.Tensor) -> GroupPages:
    """Mistakes kernel blocks for blocks, or blocks for pairs of blocks."""
    return _every_run(pages, lambda run: replace(run, stride=run.stride // 2))


def _too_short(pages: GroupPages, view: torch.Tensor) -> GroupPages:
    """Omits the last bytes of every run: scales, for example."""
    return _every_run(pages, lambda run: replace(run, size=run.size - 4))


def _one_layer_missing(pages: GroupPages, view: torch.Tensor) -> GroupPages | None:
    """Mistakes the last layer for the one before it, or the last piece of a whole block."""
    if len(pages.shards) > 1:
        return replace(pages, shards=(*pages.shards[:-1], pages.shards[-2]))
    (runs,) = pages.shards
    return replace(pages, shards=((*runs[:-1], replace(runs[-1], base=runs[-2].base)),)) if len(runs) > 1 else None


def _another_dimension(pages: GroupPages, view: torch.Tensor) -> GroupPages | None:
    """Mistakes the dimension of heads or tokens for that of blocks; a state's bytes have one dimension."""
    dims = [dim for dim in (2, 1) if dim < view.dim() - 1 and view.shape[dim] > 1]
    step = view.stride(dims[0]) * view.element_size() if dims else 0
    return _every_run(pages, lambda run: replace(run, stride=step)) if dims else None


def _every_run(pages: GroupPages, change: Any) -> GroupPages:
    return replace(pages, shards=tuple(tuple(change(run) for run in shard) for shard in pages.shards))


MISTAKES = (_neighbours, _half_apart, _too_short, _one_layer_missing, _another_dimension)


def self_test_ends(engine: Engine, worker: Worker, group: Group, *held: Stored) -> bool:
    """Returns whether the self-test accepts a rank's pages."""
    pages = held[0].pages
    store = SimpleNamespace(at_start=held, page_count=pages.page_count, layer_names=pages.layer_names)
    try:
        return self_test(depot(), {group.index: store}, worker.views, worker.config, Options())  # type: ignore[arg-type, dict-item]
    except (SelfTestError, PlacementError):
        return False


def mistakes_missed(case: Case) -> tuple[tuple[str, ...], int]:
    """Makes each mistake in every group of every stage, layer by layer and in whole blocks.

    Returns the mistakes that the self-test does not find, and the number of all that were possible. Without a mistake
    the self-test has to pass.
    """
    engine = build(case)
    missed: list[str] = []
    made = 0
    for stage, worker in enumerate(engine.workers):
        for group, layerwise in itertools.product(groups_of(engine, worker), (True, False)):
            pages = worker.pages(group.layer_names, layerwise)
            place = f"stage {stage}, group {group.index}, {'layers' if layerwise else 'whole blocks'}"
            assert _ends(engine, worker, group, pages), place
            for mistake in MISTAKES:
                wrong = mistake(pages, worker.views[group.layer_names[0]])
                if wrong is None or wrong == pages:
                    continue
                made += 1
                if _ends(engine, worker, group, wrong):
                    missed.append(f"{mistake.__name__}: {place}")
    return tuple(missed), made


def _ends(engine: Engine, worker: Worker, group: Group, pages: GroupPages) -> bool:
    return self_test_ends(engine, worker, group, Stored(facts_of(engine, worker, group, pages), pages))


# Numbers of copies.


def copies_of(engine: Engine, worker: Worker, group: Group) -> tuple[int, int, int]:
    """Returns the most copies that a page of a layer takes, by the earlier rule and now; and a whole block of the
    group."""
    now = max(len(shard) for shard in worker.pages(group.layer_names).shards)
    before = max(logical_runs(worker.views[name], worker.config.num_blocks) for name in group.layer_names)
    return before, now, len(worker.pages(group.layer_names, layerwise=False).shards[0])


def logical_runs(view: torch.Tensor, blocks: int) -> int:
    """Returns the copies of a page by the rule of 0.1: dimensions in their logical order, whatever their order in
    memory."""
    dims = [(view.shape[0] // blocks, view.stride(0)), *zip(view.shape[1:], view.stride()[1:], strict=True)]
    run, pieces = 1, 1
    for size, step in reversed([dim for dim in dims if dim[0] != 1]):
        if pieces == 1 and step == run:
            run *= size
        else:
            pieces *= size
    return pieces


def contiguous_pieces(worker: Worker, group: Group) -> int:
    """Returns the pieces of a group's block by vLLM's own placement of its pages, where each page is one piece."""
    specs = {}
    for one in worker.config.kv_cache_groups:
        inner = getattr(one.kv_cache_spec, "kv_cache_specs", None)
        specs.update(inner or dict.fromkeys(one.layer_names, one.kv_cache_spec))
    places = sorted(
        (tensor.offset + index * tensor.layer_stride, page_bytes(specs[name]))
        for tensor in worker.config.kv_cache_tensors
        for index, name in enumerate(tensor.layers)
        if name in group.layer_names
    )
    return 1 + sum(begin + size != after for (begin, size), (after, _) in itertools.pairwise(places))


def page_bytes(spec: KVCacheSpec) -> int:
    """Returns the bytes of a page without its padding."""
    if isinstance(spec, MambaSpec):
        return replace(spec, page_size_padded=None).page_size_bytes
    return spec.unpadded_page_size_bytes


def heads_of(group: Group) -> int:
    """Returns the head slots of a page; a state has one."""
    return max(spec.num_heads for spec in iter_layer_specs(group.spec) if isinstance(spec, AttentionSpec | MambaSpec))


# The documentation.


@dataclass(frozen=True)
class Row:
    """A case's row in the documentation."""

    case: Case
    layout: str = ""
    groups: str = ""
    before: int = 0
    now: int = 0
    block: int = 0
    missed: tuple[str, ...] = ()
    mistakes: int = 0
    refused: str = ""

    def __str__(self) -> str:
        case = self.case
        ranks = " ".join(f"{name} {n}" for name, n in (("TP", case.tp), ("PP", case.pp), ("DCP", case.dcp)) if n > 1)
        device = f"{case.backend}, SM {case.capability}0" if case.capability != 9 else case.backend
        cells = [case.family, device, self.layout, str(case.block), case.cache_dtype, ranks or "1"]
        if self.refused:
            return "| " + " | ".join([*cells, f"off: {self.refused}", "", "", "", "", ""]) + " |"
        seen = f"{self.mistakes - len(self.missed)} of {self.mistakes}"
        return (
            "| "
            + " | ".join([*cells, self.groups, str(self.before), str(self.now), str(self.block), seen, case.ran])
            + " |"
        )


HEAD = (
    "| model | backend | layout | block | dtype | ranks | groups | 0.1 | now | block's | self-test | real vLLM |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
)


def described(found: Geometry) -> str:
    """Describes groups in words."""
    windows = [group.window_blocks for group in found.groups]
    kinds = ["full" if not window else f"last {window}" for window in windows]
    return ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))


@cache
def row(case: Case) -> Row:
    """Runs a case and returns its row."""
    engine = build(case)
    found = engine.geometry(engine.workers[0].config)
    if found.unsupported:
        return Row(case, engine.layout.name, refused=found.unsupported)
    counted = [copies_of(engine, worker, group) for worker in engine.workers for group in groups_of(engine, worker)]
    before, now, block = (max(column) for column in zip(*counted, strict=True))
    return Row(case, engine.layout.name, described(found), before, now, block, *mistakes_missed(case))
