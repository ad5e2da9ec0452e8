"""Requests that compute on KV of which it is known too late that it is garbage.

With steps in flight (asynchronous scheduling, pipeline parallelism) a step is planned before the report of the one
before. When that report says that a load failed, vLLM takes back what its own step computed, and not what the planned
one does. What such a request computes is not stored any more, nor what others compute on its pages, and vLLM does not
keep them by hash (P1).
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet


class Taint:
    """Requests that are not to be trusted until they end, and the pages that they have."""

    def __init__(self) -> None:
        self._pages: dict[str, set[int]] = {}
        self._union: set[int] | None = set()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pages

    def __bool__(self) -> bool:
        return bool(self._pages)

    @property
    def pages(self) -> AbstractSet[int]:
        """All of them. They grow with every page that is added; only the end of a request has them united anew."""
        if self._union is None:
            self._union = set().union(*self._pages.values())
        return self._union

    def add(self, request_id: str, pages: Iterable[int]) -> None:
        """A request, with the pages that it has."""
        added = {page for page in pages if page}
        self._pages.setdefault(request_id, set()).update(added)
        if self._union is not None:
            self._union |= added

    def follow(self, request_id: str, given: Sequence[int]) -> None:
        """A step gives pages to a request: it is tainted itself when one of them is."""
        if request_id in self._pages or not self.pages.isdisjoint(given):
            self.add(request_id, given)

    def ended(self, request_id: str) -> None:
        """The request is over, and its pages may be given to others."""
        if self._pages.pop(request_id, None) is not None:
            self._union = None
