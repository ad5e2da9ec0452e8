"""Work whose end every rank reports separately, until all have."""

from collections.abc import Iterator
from typing import Generic, TypeVar

Work = TypeVar("Work")


class UntilAllRanks(Generic[Work]):
    """Numbered work that is in flight until every rank has reported its number."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._work: dict[int, Work] = {}
        self._ranks_left: dict[int, int] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._work)

    def begin(self, number: int, work: Work) -> None:
        """Adds work that no rank has reported yet."""
        self._work[number] = work
        self._ranks_left[number] = self._ranks

    def get(self, number: int) -> Work | None:
        """Returns the work with this number while it is in flight, else ``None``."""
        return self._work.get(number)

    def items(self) -> list[tuple[int, Work]]:
        """Returns numbers and work in flight, in the order in which the work began."""
        return list(self._work.items())

    def all(self) -> list[Work]:
        """Returns all work in flight, in the order in which it began."""
        return list(self._work.values())

    def reported(self, number: int, ranks: int) -> Work | None:
        """Counts ``ranks`` more ranks that have ended it. Returns the work once all have, else ``None``."""
        if number not in self._work:
            return None
        self._ranks_left[number] -= ranks
        if self._ranks_left[number] > 0:
            return None
        del self._ranks_left[number]
        return self._work.pop(number)
