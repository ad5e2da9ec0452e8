"""The proof at the start: what it leaves in the engine's pages if a copy is late."""

from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import FakeDepot, FakeTask, options

from kvdepot.engines.vllm import compute, selftest
from kvdepot.engines.vllm.stores import GroupStore

PAGES, PAGE_BYTES = 8, 16


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
    groups = [SimpleNamespace(layer_names=["a"], kv_cache_spec=SimpleNamespace())]
    config: Any = SimpleNamespace(num_blocks=PAGES, kv_cache_tensors=[], kv_cache_groups=groups)
    if loads_right:
        assert selftest.self_test(depot, {0: store}, {"a": cache}, config, options())
    else:
        with pytest.raises(selftest.SelfTestError, match="bytes read back differ"):
            selftest.self_test(depot, {0: store}, {"a": cache}, config, options())
    tasks[0].end()
    assert torch.equal(cache, before)
