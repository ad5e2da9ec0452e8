"""Slices of KV heads: the same bytes under the same names on the ranks of engines of every tensor-parallel size."""

import ctypes
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_parts import FakeDepot, FakeTask, geometry, options

from kvdepot.engines.vllm.compute import NOW
from kvdepot.engines.vllm.joint import JointTask
from kvdepot.engines.vllm.meta import Blocks, LoadReport, RankNamespaces
from kvdepot.engines.vllm.pages import GroupPages
from kvdepot.engines.vllm.scheduler import SchedulerSide
from kvdepot.engines.vllm.shares import ALONE, Share
from kvdepot.engines.vllm.slices import HeadSlices, WholeError, head_slices, kv_head_counts, slice_pages
from kvdepot.engines.vllm.stores import GroupStore, Part, Stored
from kvdepot.errors import BusyError

LAYERS, PAGES, HEADS, TOKENS, CONTENT = 3, 4, 8, 4, 6
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
NAMES = [f"layers.{index}" for index in range(LAYERS)]
CACHE = np.random.default_rng(3).integers(0, 60000, (LAYERS, PAGES, HEADS, TOKENS, CONTENT), dtype=np.uint16)
"""The complete content over all ranks."""


def tensor(array: np.ndarray) -> Any:
    """The part of a torch tensor that ``slices`` uses."""
    item = array.itemsize
    return SimpleNamespace(
        shape=array.shape,
        dtype=str(array.dtype),
        device=SimpleNamespace(type="cpu", index=None),
        stride=lambda: tuple(step // item for step in array.strides),
        element_size=lambda: item,
        data_ptr=lambda: array.ctypes.data,
        keep=array,
    )


def caches(layout: str, heads: range) -> dict[str, Any]:
    """A rank's layers [B, H, N, C] in one allocation of the layout."""
    order = LAYOUTS[layout]
    backing = np.ascontiguousarray(CACHE[:, :, heads.start : heads.stop].transpose(order))
    logical = backing.transpose(np.argsort(order))
    return {name: tensor(logical[index]) for index, name in enumerate(NAMES)}


def slices_of_engine(layout: str, ranks: int, count: int, layerwise: bool) -> dict[int, tuple[GroupPages, Any]]:
    """Returns by number the pages of all slices of an engine, with the objects that have to stay alive."""
    found = {}
    for rank in range(ranks):
        slices = head_slices(HEADS, count, ranks, rank)
        own = caches(layout, range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks))
        for number, heads in slices.parts():
            found[number] = slice_pages(NAMES, own, PAGES, layerwise, slices.rank_heads, heads), own
    return found


def read(pages: GroupPages, page: int) -> bytes:
    runs = [run for shard in pages.shards for run in shard]
    return b"".join(ctypes.string_at(run.base + page * run.stride, run.size) for run in runs)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize(("layout", "layerwise"), [(layout, how) for layout in LAYOUTS for how in (True, False)])
def test_a_slice_has_the_same_bytes_and_names_at_every_tensor_parallel_size(
    layout: str, layerwise: bool, count: int
) -> None:
    size = HEADS // count
    for ranks in [ranks for ranks in (1, 2, 4, 8) if ranks <= count]:
        found = slices_of_engine(layout, ranks, count, layerwise)
        assert sorted(found) == list(range(count))
        (names,) = {(str(pages.layout), pages.forms) for pages, _ in found.values()}
        one_rank, _ = slices_of_engine(layout, 1, count, layerwise)[0]
        assert names == (str(one_rank.layout), one_rank.forms)
        for number, (pages, _) in found.items():
            for page in range(PAGES):
                part = CACHE[:, page, number * size : (number + 1) * size]
                # The layout's own order, without its blocks; layer by layer without its layers, too.
                order = [axis - (axis > 1) for axis in LAYOUTS[layout] if axis != 1]
                if layerwise:
                    order = [0, *(axis for axis in order if axis != 0)]
                assert read(pages, page) == part.transpose(order).tobytes(), (ranks, number, page)


@pytest.mark.parametrize(
    ("layout", "layerwise", "runs_of_the_largest", "runs_of_one_rank"),
    [
        ("LBHNC", True, 1, 1),
        ("LBNHC", True, 1, TOKENS),
        ("LHBNC", True, 2, 2),
        ("LBHNC", False, LAYERS, LAYERS),
        ("BLHNC", False, 1, LAYERS),
        ("BHLNC", False, 1, 1),
        ("LBNHC", False, LAYERS, LAYERS * TOKENS),
    ],
)
def test_the_engine_with_as_many_ranks_as_slices_copies_as_few_runs_as_without_slices(
    layout: str, layerwise: bool, runs_of_the_largest: int, runs_of_one_rank: int
) -> None:
    """The others split their runs where heads of other slices lie in between."""
    runs = {
        ranks: {
            len(shard) for pages, _ in slices_of_engine(layout, ranks, 4, layerwise).values() for shard in pages.shards
        }
        for ranks in (4, 1)
    }
    assert runs == {4: {runs_of_the_largest}, 1: {runs_of_one_rank}}


def test_layouts_whose_bytes_are_in_another_order_have_another_form() -> None:
    def forms(layout: str, layerwise: bool) -> str:
        pages, _ = slices_of_engine(layout, 2, 4, layerwise)[0]
        return str((pages.forms, pages.layout))

    assert forms("LBHNC", layerwise=True) != forms("LBNHC", layerwise=True)
    assert forms("LBHNC", layerwise=False) != forms("BHLNC", layerwise=False)
    assert forms("LBHNC", layerwise=False) == forms("BLHNC", layerwise=False), "the same bytes"


@pytest.mark.parametrize(
    ("heads", "wanted", "ranks", "first", "held", "replicas"),
    [
        (8, 8, 1, [0], 8, 1),
        (8, 4, 1, [0], 4, 1),
        (8, 4, 2, [0, 2], 2, 1),
        (8, 4, 4, [0, 1, 2, 3], 1, 1),
        (8, 64, 8, [0, 1, 2, 3, 4, 5, 6, 7], 1, 1),
        (2, 2, 4, [0, 0, 1, 1], 1, 2),
        (2, 8, 8, [0, 0, 0, 0, 1, 1, 1, 1], 1, 4),
        (1, 4, 2, [0, 0], 1, 2),
        (12, 6, 3, [0, 2, 4], 2, 1),
    ],
)
def test_slices_are_shared_out_in_the_order_of_ranks(
    heads: int, wanted: int, ranks: int, first: list[int], held: int, replicas: int
) -> None:
    found = [head_slices(heads, wanted, ranks, rank) for rank in range(ranks)]
    assert [one.first for one in found] == first
    assert {one.held for one in found} == {held}
    assert {one.all_heads for one in found} == {heads}
    assert [one.replica for one in found] == [rank % replicas for rank in range(ranks)]
    assert {one.replicas for one in found} == {replicas}


@pytest.mark.parametrize(
    ("heads", "wanted", "ranks", "why"),
    [
        (8, 3, 1, "8 KV heads cannot be cut into 3 equal slices"),
        (8, 2, 4, "2 slices cannot be distributed over 4 ranks: use a multiple of 4"),
        (8, 4, 16, "16 ranks hold one of 8 KV heads each: use 8 slices or more, not 4"),
        (8, 8, 3, "8 KV heads cannot be distributed over 3 ranks"),
        (8, 8, 12, "8 KV heads cannot be distributed over 12 ranks"),
    ],
)
def test_what_cannot_be_shared_out_is_not_cut(heads: int, wanted: int, ranks: int, why: str) -> None:
    with pytest.raises(WholeError, match=why):
        head_slices(heads, wanted, ranks, 0)


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        ({"num_key_value_heads": 8, "num_attention_heads": 32, "head_dim": 128}, {8}),
        ({"num_key_value_heads": 4, "swa_num_key_value_heads": 8}, {4, 8}),
        ({"num_kv_heads": None, "multi_query": True}, set()),
        ({"layers": [{"attention": {"n_kv_heads": 2}}, {"attention": {"n_kv_heads": 4}}]}, {2, 4}),
        ({"num_key_value_heads": [8, 8, 2], "kv_head_dim": 64}, {2, 8}),
    ],
)
def test_numbers_of_kv_heads_are_found_wherever_a_configuration_names_them(config: Any, counts: set[int]) -> None:
    assert kv_head_counts(config) == counts


def test_a_tensor_of_other_dimensions_is_not_cut() -> None:
    own = caches("LBHNC", range(HEADS))
    with pytest.raises(WholeError, match="not \\[block, 4 heads, token, content\\]"):
        slice_pages(NAMES, own, PAGES, True, 4, range(2))
    flat = {name: tensor(one.keep.reshape(PAGES, HEADS, -1)) for name, one in own.items()}
    with pytest.raises(WholeError, match="token, content"):
        slice_pages(NAMES, flat, PAGES, True, HEADS, range(2))


def test_the_parts_of_a_rank_count_heads_from_its_own_first() -> None:
    assert HeadSlices(count=4, slice_heads=2, first=2, held=2).parts() == [(2, range(2)), (3, range(2, 4))]


# Shares of the dumps.


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("blocks", [0, 1, 2, 7, 64])
def test_every_block_is_in_one_share_and_shares_are_equal(blocks: int, count: int) -> None:
    step = Blocks([bytes([7, 7, 7, 7, 7, 7, 7, 7, index]) for index in range(blocks)], list(range(100, 100 + blocks)))
    shares = [Share(index, count).of(step) for index in range(count)]
    assert sorted(page for share in shares for page in share.pages) == step.pages
    assert all(share.hashes == [step.hashes[page - 100] for page in share.pages] for share in shares)
    assert max(len(share.pages) for share in shares) - min(len(share.pages) for share in shares) <= 1


def test_steps_with_one_block_do_not_all_meet_the_same_rank() -> None:
    hashes = [np.random.default_rng(index).bytes(32) for index in range(64)]
    dumped = [sum(bool(Share(index, 4).of(Blocks([one], [1])).pages) for one in hashes) for index in range(4)]
    assert sum(dumped) == 64
    assert min(dumped) > 0


def test_a_rank_alone_dumps_all() -> None:
    step = Blocks([b"a", b"b"], [1, 2])
    assert ALONE.of(step) is step


# Requirements of a hit.


@pytest.mark.parametrize(
    ("told", "claimed"),
    [
        ([("s0", "s1", "s2", "s3")], ["s0", "s1", "s2", "s3"]),
        ([("s0", "s1"), ("s2", "s3")], ["s0", "s1", "s2", "s3"]),
        ([("s0",), ("s0",), ("s1",), ("s1",)], ["s0", "s1"]),
    ],
)
def test_a_hit_needs_every_slice_of_every_rank_once(told: list[tuple[str, ...]], claimed: list[str]) -> None:
    side = SchedulerSide(FakeDepot(), options(), geometry(), len(told))  # type: ignore[arg-type]
    side.reported(LoadReport(ranks=[RankNamespaces({0: names}, rank=rank) for rank, names in enumerate(told)]))
    (group,) = side._namespaces.groups
    assert [namespace.id for namespace in group.stores] == claimed


# Tasks of several slices.


def store_of(*tasks: FakeTask | None) -> GroupStore:
    """A group's store with one part per slice; a slice without a task refuses all."""

    def part(task: FakeTask | None) -> Part:
        def begin(*args: Any, **kwargs: Any) -> FakeTask:
            if task is None:
                raise BusyError("the queue is full")
            task.block_count = 1  # type: ignore[attr-defined]
            return task

        return Part(None, SimpleNamespace(dump_pages=begin, begin_dump_pages=begin, load_pages=begin))  # type: ignore[arg-type]

    return GroupStore((), tuple(part(task) for task in tasks), ALONE, {})


@pytest.mark.parametrize(
    "begin",
    [
        lambda store: store.dump(Blocks([b"a"], [1]), NOW),
        lambda store: store.begin_dump(Blocks([b"a"], [1])),
        lambda store: store.load(Blocks([b"a"], [1]), NOW),
    ],
    ids=["dump", "begin_dump", "load"],
)
def test_a_store_begins_every_slice_and_forgets_none_that_it_has_begun(begin: Any) -> None:
    """Tasks that have begun touch the pages: the others' refusal must not hide that (P3)."""
    one, other = FakeTask(), FakeTask(done=False)
    assert begin(store_of(one)) is one
    both = begin(store_of(one, other))
    assert not both.done()
    assert both.result().failed.tolist() == []
    half = begin(store_of(other, None))
    assert not half.done()
    assert half.result().failed.tolist() == [0]
    with pytest.raises(BusyError):
        begin(store_of(None, other))


def joint(*tasks: FakeTask, refused: str = "") -> JointTask:
    for task in tasks:
        task.block_count = 4  # type: ignore[attr-defined]
    return JointTask(tasks, refused)  # type: ignore[arg-type]


def test_a_block_is_whole_when_every_slice_is() -> None:
    task = joint(FakeTask(failed=(1,)), FakeTask(), FakeTask(failed=(1, 3)))
    assert task.result().failed.tolist() == [1, 3]
    assert task.result().failures == {"timeout": 3}
    assert joint(FakeTask(), FakeTask()).result().failed.tolist() == []


def test_slices_of_which_one_was_refused_are_not_whole_and_are_waited_for() -> None:
    running = FakeTask(done=False)
    task = joint(running, refused="busy")
    assert not task.done()
    assert task.result().failed.tolist() == [0, 1, 2, 3]
    assert task.result().failures == {"busy": 4}
    assert task.wait_done()
    assert running.is_done


def test_slices_have_ended_when_the_last_one_has() -> None:
    first, last = FakeTask(), FakeTask(done=False)
    task = joint(first, last)
    assert not task.done()
    assert not task.wait_done(0)
    assert task.wait_done()
    assert task.done()


@pytest.mark.parametrize("in_time", [True, False])
def test_a_layer_is_there_when_all_slices_of_it_are(in_time: bool) -> None:
    tasks = FakeTask(), FakeTask(shards_in_time=in_time)
    task = joint(*tasks)
    assert task.wait_shard(2, timeout_ms=10) is in_time
    assert task.wait_shard_on(2, stream=7, timeout_ms=10) is in_time
    assert [one.shards for one in tasks] == [[2], [2]]
    assert [one.streams for one in tasks] == [[(2, 7)], [(2, 7)]]
    task.submit_shard(1, wait_event=9)
    assert [one.shards for one in tasks] == [[2, 1], [2, 1]]
    assert [one.events for one in tasks] == [[9], [9]]


def test_a_store_of_another_version_closes_the_namespaces_that_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    uses: list[str] = []

    def opened(_depot: Any, stored: Stored, _options: Any, _owner: Any) -> Part:
        def close() -> None:
            uses.remove(stored.facts)
            if stored.facts not in uses:
                closed.append(stored.facts)

        uses.append(stored.facts)
        store: Any = SimpleNamespace(namespace=SimpleNamespace(close=close), close=lambda _wait_ms: True)
        return Part(stored, store)

    monkeypatch.setattr(Part, "open", staticmethod(opened))
    pages: Any = SimpleNamespace(shard_of_layer=dict)
    held = [Stored(json.dumps({"slice": number}), pages) for number in range(2)]
    depot: Any = None
    first = GroupStore.open(depot, held, options(), ALONE)
    same = first.of_version(depot, "", options(), None)
    assert closed == []
    second = same.of_version(depot, "v2", options(), None)
    assert closed == [stored.facts for stored in held]
    second.of_version(depot, "v3", options(), None)
    assert closed[2:] == [stored.of_version("v2").facts for stored in held]
