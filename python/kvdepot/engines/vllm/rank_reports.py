"""Work of which every rank reports the end, each by itself: when have all?"""

from collections.abc import Iterator
from typing import Generic, TypeVar

Work = TypeVar("Work")


class UntilAllRanks(Generic[Work]):
    """Numbered work that is under way until every rank has reported its number."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._work: dict[int, Work] = {}
        self._ranks_left: dict[int, int] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._work)

    def begin(self, number: int, work: Work) -> None:
        """Work that no rank has reported yet."""
        self._work[number] = work
        self._ranks_left[number] = self._ranks

    def get(self, number: int) -> Work | None:
        """The work of this number while it is under way."""
        return self._work.get(number)

    def items(self) -> list[tuple[int, Work]]:
        """Numbers and work under way, in the order in which it began."""
        return list(self._work.items())

    def all(self) -> list[Work]:
        """All that is under way, in the order in which it began."""
        return list(self._work.values())

    def reported(self, number: int, ranks: int) -> Work | None:
        """So many more ranks have ended it; the work when all have now, ``None`` before that and ever after."""
        if number not in self._work:
            return None
        self._ranks_left[number] -= ranks
        if self._ranks_left[number] > 0:
            return None
        del self._ranks_left[number]
        return self._work.pop(number)
