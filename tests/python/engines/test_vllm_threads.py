"""Threads for work that may never end."""

import queue
import threading

import pytest

from kvdepot.engines.vllm.threads import Threads


def test_work_gets_a_thread_of_its_own_while_others_are_busy() -> None:
    threads, meeting = Threads(4, 0), threading.Barrier(4)
    met: queue.Queue[int] = queue.Queue()
    for _ in range(4):
        threads.begin(lambda: met.put(meeting.wait(60)))
    assert sorted(met.get(timeout=60) for _ in range(4)) == [0, 1, 2, 3]


def test_work_waits_in_order_for_the_last_thread() -> None:
    threads, is_over = Threads(1, 3), threading.Event()
    ran: queue.Queue[int] = queue.Queue()
    threads.begin(lambda: bool(is_over.wait(60)) or None)
    for number in range(3):
        threads.begin(lambda number=number: ran.put(number))  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="too much waits"):
        threads.begin(lambda: ran.put(9))
    assert ran.empty()
    is_over.set()
    assert [ran.get(timeout=60) for _ in range(3)] == [0, 1, 2]


def test_a_thread_outlives_work_that_fails() -> None:
    threads, ran = Threads(1, 1), threading.Event()
    threads.begin(lambda: print(1 // 0))
    threads.begin(ran.set)
    assert ran.wait(60)


def test_without_another_thread_work_waits_for_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, is_over, ran = Threads(2, 0), threading.Event(), threading.Event()
    threads.begin(lambda: bool(is_over.wait(60)) or None)

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    threads.begin(ran.set)
    is_over.set()
    assert ran.wait(60)
    with pytest.raises(RuntimeError, match="can't start"):
        Threads(1, 1).begin(ran.set)
