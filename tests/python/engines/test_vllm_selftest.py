"""The proof at the start: what it leaves in the engine's pages if a copy is late, and beside another connector."""

from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import FakeDepot, FakeTask, options, registered
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvdepot.engines.vllm import compute, selftest, worker
from kvdepot.engines.vllm.meta import StepMetadata
from kvdepot.engines.vllm.siblings import has_siblings
from kvdepot.engines.vllm.stores import GroupStore

PAGES, PAGE_BYTES = 8, 16


def kv_cache_config() -> Any:
    """Returns vLLM's configuration of a cache with one layer."""
    groups = [SimpleNamespace(layer_names=["a"], kv_cache_spec=SimpleNamespace())]
    return SimpleNamespace(num_blocks=PAGES, kv_cache_tensors=[], kv_cache_groups=groups)


class LateLoad(FakeTask):
    """Does not end in time; writes when it ends, whoever has the pages by then."""

    def __init__(self, write: Any) -> None:
        super().__init__(done=False)
        self.write = write

    def wait_done(self, timeout_ms: int | None = None) -> bool:
        if timeout_ms is None:
            self.end()
        return self.is_done

    def end(self) -> None:
        if not self.is_done:
            self.write()
        self.is_done = True


@pytest.mark.parametrize("failed", [(), (1,)])
def test_a_copy_that_is_late_is_waited_for_until_it_ends(failed: tuple[int, ...]) -> None:
    """The pages are restored, and in use, after it (P1)."""
    task = FakeTask(failed, done=False)
    assert selftest._moved(task, timeout_ms=1) is (not failed)  # type: ignore[arg-type]
    assert task.is_done


@pytest.mark.parametrize("loads_right", [True, False])
def test_a_load_that_is_late_writes_nothing_after_the_pages_were_given_back(
    monkeypatch: pytest.MonkeyPatch, loads_right: bool
) -> None:
    """A pattern in a page in use would be served as KV (P1); late bytes are compared like others."""
    torch = pytest.importorskip("torch")
    cache = torch.arange(PAGES * PAGE_BYTES, dtype=torch.uint8).reshape(PAGES, PAGE_BYTES)
    before = cache.clone()
    stored: dict[bytes, Any] = {}
    tasks: list[LateLoad] = []

    def dump(blocks: Any, after: Any) -> FakeTask:
        stored.update({h: cache[p].clone() for h, p in zip(blocks.hashes, blocks.pages, strict=True)})
        return FakeTask()

    def load(blocks: Any, after: Any) -> LateLoad:
        def write() -> None:
            for block_hash, page in zip(blocks.hashes, blocks.pages, strict=True):
                cache[page] = stored[block_hash] if loads_right else 0x3F

        tasks.append(LateLoad(write))
        return tasks[-1]

    trial = SimpleNamespace(dump=dump, load=load, namespaces=["trial"], parts=[], close=lambda: None)
    store: Any = SimpleNamespace(page_count=PAGES, layer_names=("a",), at_start=())
    monkeypatch.setattr(GroupStore, "open", lambda *args, **kwargs: trial)
    monkeypatch.setattr(compute, "_cuda", lambda: None)
    depot: Any = FakeDepot()
    depot.attached = True
    config = kv_cache_config()
    if loads_right:
        assert selftest.self_test(depot, {0: store}, {"a": cache}, config, options())
    else:
        with pytest.raises(selftest.SelfTestError, match="bytes read back differ"):
            selftest.self_test(depot, {0: store}, {"a": cache}, config, options())
    tasks[0].end()
    assert torch.equal(cache, before)


class Child(KVConnectorBase_V1):  # type: ignore[misc, unused-ignore]
    """A connector that wants to know whether it has siblings."""

    def __init__(self) -> None:
        self.found = has_siblings(self)


class Heir(Child):
    """The same under another name."""

    def __init__(self) -> None:
        super().__init__()


class Parent(KVConnectorBase_V1):  # type: ignore[misc, unused-ignore]
    """Has children, as `MultiConnector`."""

    def __init__(self) -> None:
        self.children = [kind() for kind in (Child, Heir)]


for connector in (Child, Heir, Parent):
    connector.__abstractmethods__ = frozenset()  # of vLLM's base class, where it is installed


class Engine:
    """Has a connector."""

    def __init__(self, kind: type[Any]) -> None:
        self.connector = kind()


@pytest.mark.parametrize("kind", [Child, Heir])
def test_a_connector_knows_whether_another_one_creates_it(kind: type[Child]) -> None:
    assert not Engine(kind).connector.found
    assert all(child.found for child in Engine(Parent).connector.children)


def late_depot() -> Any:
    """Returns a depot that does not answer yet."""
    depot: Any = FakeDepot()
    depot.attached, depot.close = False, lambda: None
    return depot


@pytest.mark.parametrize("siblings", [True, False])
def test_a_depot_that_comes_late_is_tested_only_where_nobody_else_uses_the_pages(
    monkeypatch: pytest.MonkeyPatch, siblings: bool
) -> None:
    """Beside other connectors all ranks stay off, and the log says what to do."""
    depot, tested = late_depot(), []

    def self_test(*_: Any) -> bool:
        tested.append(depot.attached)
        return bool(depot.attached)

    monkeypatch.setattr(worker, "self_test", self_test)
    store = SimpleNamespace(close=lambda *_: True)
    side = registered(monkeypatch, depot, {0: store}, kv_cache_config(), has_siblings=siblings)
    report = side.report()
    assert report is not None
    assert [("start the depot first" in rank.broken) for rank in report.ranks] == [siblings]
    depot.attached = True
    side.prepare(StepMetadata())
    assert tested == ([False] if siblings else [False, True])
    side.close()


def test_what_another_connector_receives_in_a_page_stays_when_a_depot_comes_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The self-test puts back what it found in the pages, which would undo a transfer that arrives meanwhile (P1)."""
    torch = pytest.importorskip("torch")
    cache = torch.zeros((PAGES, PAGE_BYTES), dtype=torch.uint8)
    page, arrived = selftest.SOURCE_PAGES[0], []

    def arrive() -> None:
        if not arrived:
            cache[page] = 0x5A
            arrived.append(page)

    def dump(blocks: Any, after: Any) -> FakeTask:
        arrive()
        return FakeTask((0,))

    trial = SimpleNamespace(dump=dump, namespaces=["trial"], parts=[], close=lambda: None)
    store: Any = SimpleNamespace(page_count=PAGES, layer_names=("a",), at_start=(), close=lambda *_: True)
    monkeypatch.setattr(GroupStore, "open", lambda *args, **kwargs: trial)
    monkeypatch.setattr(compute, "_cuda", lambda: None)
    depot = late_depot()
    side = registered(monkeypatch, depot, {0: store}, kv_cache_config(), {"a": cache}, has_siblings=True)
    depot.attached = True
    side.prepare(StepMetadata())
    arrive()
    assert torch.all(cache[page] == 0x5A)
    side.close()
