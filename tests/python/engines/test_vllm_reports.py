"""What the scheduler keeps until every rank has reported, and untrusted pages."""

from collections.abc import ValuesView

from kvdepot.engines.vllm.rank_reports import UntilAllRanks
from kvdepot.engines.vllm.taint import Taint


def test_work_ends_with_the_last_rank_and_only_once() -> None:
    work: UntilAllRanks[str] = UntilAllRanks(3)
    work.begin(1, "one")
    work.begin(2, "two")
    assert work.reported(1, 1) is None
    assert work.reported(2, 2) is None
    assert work.reported(1, 2) == "one"
    assert work.reported(1, 1) is None
    assert work.get(1) is None
    assert work.items() == [(2, "two")]
    assert work.reported(9, 3) is None
    assert work.reported(2, 1) == "two"
    assert list(work) == work.all() == []


def test_tainted_pages_are_those_of_requests_that_go_on() -> None:
    taint = Taint()
    taint.add("a", [1, 2, 0])
    taint.follow("b", [2, 3])
    taint.follow("c", [4])
    assert taint.pages == {1, 2, 3}
    taint.follow("a", [9])
    assert taint.pages == {1, 2, 3, 9}
    taint.ended("a")
    assert taint.pages == {2, 3}
    taint.ended("b")
    assert not taint
    assert taint.pages == set()


class Counted(dict[str, set[int]]):
    """Counts iterations over all values."""

    walks = 0

    def values(self) -> ValuesView[set[int]]:
        self.walks += 1
        return super().values()


def test_a_step_unites_the_tainted_pages_at_most_once() -> None:
    taint = Taint()
    for number in range(1, 11):
        taint.add(f"tainted {number}", [number])
    taint._pages = counted = Counted(taint._pages)
    taint.ended("tainted 1")
    for number in range(100):
        taint.follow(f"request {number}", [number + 1])
    assert taint.pages == set(range(2, 11))
    assert counted.walks == 1
