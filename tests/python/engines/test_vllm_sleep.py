"""Sleep mode: what vLLM's worker does to the pages, and when the connector is notified (P3)."""

from typing import Any

import pytest
from engine_parts import FakeDepot, registered

from kvdepot.engines.vllm import worker as rank
from kvdepot.engines.vllm.releases.sleep import UnwatchedSleepError, watch_sleep


class Worker:
    """The part of vLLM's worker that handles sleep."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def sleep(self, level: int = 1) -> str:
        self.log.append(f"memory goes, level {level}")
        return "slept"

    def wake_up(self, tags: list[str] | None = None) -> str:
        self.log.append(f"memory comes, {tags}")
        return "awake"


class LaterWorker(Worker):
    """One that can release one kind of memory only."""

    def discard(self, tags: tuple[str, ...]) -> None:
        self.log.append(f"memory goes, {tags}")


def watched(worker: Any) -> Any:
    watch_sleep(worker, lambda: worker.log.append("copies end"), lambda: worker.log.append("pages are back"))
    return worker


@pytest.mark.parametrize("kind", [Worker, LaterWorker])
def test_copies_end_before_the_memory_goes_and_begin_when_it_is_back(kind: type[Worker]) -> None:
    worker = watched(kind([]))
    assert worker.sleep(level=2) == "slept"
    assert worker.wake_up(["weights"]) == "awake"
    assert worker.wake_up(tags=["kv_cache"]) == "awake"
    assert worker.log == [
        "copies end",
        "memory goes, level 2",
        "memory comes, ['weights']",
        "memory comes, ['kv_cache']",
        "pages are back",
    ]
    worker.log.clear()
    worker.wake_up()
    assert worker.log == ["memory comes, None", "pages are back"]


def test_pages_alone_may_go() -> None:
    worker = watched(LaterWorker([]))
    worker.discard(tags=("kv_cache",))
    worker.discard(("weights",))
    assert worker.log == ["copies end", "memory goes, ('kv_cache',)", "memory goes, ('weights',)"]


def test_an_engine_whose_sleep_cannot_be_watched_is_refused() -> None:
    """Its copies would touch missing memory, and its registrations would refer to freed memory (P1)."""
    with pytest.raises(UnwatchedSleepError, match="--enable-sleep-mode"):
        watch_sleep(None, lambda: None, lambda: None)


@pytest.mark.parametrize(
    ("options", "watched"),
    [
        ({}, False),
        ({"enable_sleep_mode": False, "enable_cumem_allocator": False}, False),
        ({"enable_sleep_mode": True, "enable_cumem_allocator": True}, True),
        ({"enable_sleep_mode": True}, True),
        ({"enable_sleep_mode": False, "enable_cumem_allocator": True}, True),
    ],
)
def test_every_engine_whose_pages_can_lose_their_memory_is_watched(
    options: dict[str, bool], watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its allocator alone, vLLM's worker has no sleep mode, but sleeps when it is told to."""
    seen: list[Any] = []
    monkeypatch.setattr(rank, "watch_sleep", lambda *hooks: seen.append(hooks))
    monkeypatch.setattr(rank, "self_test", lambda *_: True)
    depot: Any = FakeDepot()
    depot.close = lambda: None
    side = registered(monkeypatch, depot, {}, kv_cache_config=object(), **options)
    assert bool(seen) == watched
    side.close()
