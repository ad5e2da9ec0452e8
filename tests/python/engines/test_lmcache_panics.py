"""A panic of the core in LMCache is a miss, as any failure is, and no memory goes back that may still be copied.

Python gets a panic as an exception that is no ``Exception``.
"""

import asyncio
import os
import select
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvdepot.config import load_config
from kvdepot.engines import copies
from kvdepot.engines.lmcache import weights as lmcache_weights
from kvdepot.engines.lmcache.bounded import Bounded
from kvdepot.engines.lmcache.counters import Counters
from kvdepot.engines.lmcache.facts import Layout
from kvdepot.engines.lmcache.locker import _release
from kvdepot.engines.lmcache.stores import Moved, Stores
from kvdepot.engines.lmcache.tasks import WAITING_MAX, StillCopyingError, Tasks
from kvdepot.engines.lmcache.weights import Weights
from kvdepot.errors import ConfigError

Panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
LAYOUT = Layout("m", ((8,),), ("bfloat16",), "", 16)


def panic(*_: Any, **__: Any) -> Any:
    raise Panic("index out of bounds")


def ended(tasks: Tasks[str]) -> None:
    """Waits until a task has ended."""
    assert select.select([tasks.fileno()], [], [], 60)[0]
    os.eventfd_read(tasks.fileno())


def test_a_task_that_panics_ends_as_a_miss() -> None:
    counts = Counters()
    tasks: Tasks[str] = Tasks("load", 1, counts)
    number = tasks.submit(panic, lambda: "miss")
    ended(tasks)
    assert tasks.take(number) == "miss"
    assert tasks._waiting == 0
    assert counts.snapshot() == {"load_error": 1}
    tasks.close()


def test_a_task_whose_memory_may_still_be_copied_never_ends_and_takes_no_place() -> None:
    counts = Counters()
    tasks: Tasks[str] = Tasks("load", 1, counts)
    begun = threading.Semaphore(0)

    def copies() -> str:
        begun.release()
        raise StillCopyingError("1 of its objects may still be copied")

    for _ in range(WAITING_MAX):
        tasks.submit(copies, lambda: "miss")
    assert all(begun.acquire(timeout=60) for _ in range(WAITING_MAX))
    last = tasks.submit(lambda: "well", lambda: "not begun")
    while not (found := tasks.take_all()):
        ended(tasks)
    assert found == {last: "well"}
    tasks.close()
    assert tasks._waiting == 0
    assert tasks.take_all() == {}
    assert counts.snapshot()["load_never_ends"] + counts.snapshot().get("load_not_begun", 0) >= WAITING_MAX


def test_work_that_panics_is_missed() -> None:
    counts = Counters()
    work = Bounded("lookup", 1, counts)
    assert asyncio.run(work.run(panic, "missed")) == "missed"
    work.close()
    assert counts.snapshot() == {"lookup_error": 1}


def test_weights_whose_files_cannot_be_read_for_a_panic_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_weights, "model_digest", panic)
    with pytest.raises(ConfigError, match="index out of bounds"):
        Weights("", 60.0).facts("m")


def test_all_claims_are_released_although_one_panics() -> None:
    released: list[str] = []
    _release([SimpleNamespace(release=panic), SimpleNamespace(release=lambda: released.append("released"))])
    assert released == ["released"]


class Task:
    """A task whose calls panic if they are named; it is done when it was asked three times."""

    def __init__(self, *panics: str) -> None:
        self._panics = panics
        self.asked: list[str] = []

    def _asked(self, name: str) -> None:
        self.asked.append(name)
        if name in self._panics:
            panic()

    def wait_done(self) -> bool:
        self._asked("wait_done")
        return True

    def done(self) -> bool:
        self._asked("done")
        return self.asked.count("done") == 3

    def result(self) -> Any:
        self._asked("result")
        return SimpleNamespace(failed=np.arange(0), failures={})


def stores(store: Any, depot: Any = None) -> tuple[Stores, Counters]:
    counts = Counters()
    config = load_config({"pool_gb": 0.1, "mode": "node"}, owns_pool=False)
    made = SimpleNamespace(open=lambda **_: store) if depot is None else depot
    return Stores(config, lambda _: {}, counts, lambda *_, **__: made), counts


def moved(*tasks: Task) -> tuple[Moved, Counters]:
    """Loads one object by each task."""
    of = {bytes([number]) * 16: task for number, task in enumerate(tasks)}
    found, counts = stores(SimpleNamespace(load=lambda hashes, _: of[hashes[0]]))
    layouts = [Layout("m", ((8,),), ("bfloat16",), str(number), 16) for number in range(len(tasks))]
    return found.move("load", [(layouts[number], name, 64) for number, name in enumerate(of)]), counts


def test_a_wait_that_panics_is_no_end_of_the_copy() -> None:
    task, after = Task("wait_done"), Task()
    found, counts = moved(task, after)
    assert task.asked == ["wait_done", "done", "done", "done", "result"]
    assert found == Moved([True, True], [False, False], [False, False])
    assert counts.snapshot() == {"load_error": 1, "loaded": 2}


def test_a_task_that_does_not_tell_whether_it_copies_keeps_its_memory() -> None:
    task, after = Task("wait_done", "done"), Task()
    found, counts = moved(task, after)
    assert after.asked == ["wait_done", "result"]
    assert found == Moved([False, True], [False, False], [True, False])
    assert counts.snapshot() == {"load_error": 2, "load_unknown": 1, "loaded": 1}


def test_a_task_that_never_ends_is_asked_for_a_multiple_of_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(copies, "time", SimpleNamespace(sleep=waited.append))
    why: list[str] = []
    task = SimpleNamespace(wait_done=panic, done=lambda: False)
    assert not copies.copied(task, why.append, 2.5)
    assert sum(waited) == pytest.approx(copies.LIMITS * 2.5)
    assert why[1:] == ["it has not ended within 3 times its time limit of 2.5 s"]


def test_a_result_that_panics_is_a_miss() -> None:
    found, counts = moved(Task("result"), Task())
    assert found == Moved([False, True], [False, False], [False, False])
    assert counts.snapshot() == {"load_error": 1, "loaded": 1}


class Broken:
    """A store, or a depot, whose calls all panic."""

    lookup = stats = load = prefetch = reset = claim = close = panic

    @property
    def attached(self) -> bool:
        return bool(panic())


@pytest.mark.parametrize(
    ("call", "missed"),
    [
        (lambda found: found.lookup([(LAYOUT, b"k")]), [False]),
        (lambda found: found.gone([(LAYOUT, b"k")]), [False]),
        (lambda found: found.move("load", [(LAYOUT, b"k", 64)]).done, [False]),
        (lambda found: found.claim(LAYOUT, [b"k"]), None),
        (lambda found: found.prefetch([(LAYOUT, b"k")]), None),
        (lambda found: found.reset(LAYOUT), False),
        (lambda found: found.pool_use(), None),
        (lambda found: found.reaches_depot(), False),
        (lambda found: found.attached(), False),
        (lambda found: found.close(), None),
    ],
    ids=["lookup", "gone", "move", "claim", "prefetch", "reset", "pool_use", "reaches_depot", "attached", "close"],
)
def test_stores_never_raise_a_panic(call: Callable[[Stores], Any], missed: Any) -> None:
    depot = Broken()
    depot.open = lambda **_: Broken()  # type: ignore[attr-defined]
    found, _ = stores(None, depot)
    found.open(LAYOUT)
    assert call(found) == missed


def test_a_store_whose_opening_panics_is_a_miss() -> None:
    found, counts = stores(None, SimpleNamespace(open=panic))
    assert found.lookup([(LAYOUT, b"k")]) == [False]
    assert counts.snapshot() == {"not_open": 1, "open_error": 1}


def test_a_request_to_exit_is_no_miss() -> None:
    def leave(*_: Any) -> Any:
        raise KeyboardInterrupt

    found, _ = stores(SimpleNamespace(lookup=leave, attached=True))
    with pytest.raises(KeyboardInterrupt):
        found.lookup([(LAYOUT, b"k")])
