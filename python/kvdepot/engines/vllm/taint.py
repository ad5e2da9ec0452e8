"""Requests that compute on KV that turned out too late to be garbage.

With steps in flight (asynchronous scheduling, pipeline parallelism) a step is planned before the report of the previous
one. If that report says that a load failed, vLLM discards the results of the failed step, but not those of the planned
one. Blocks that such a request computes, and blocks that others compute on its pages, are not stored any more, and vLLM
does not keep them by hash (P1).
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet


class Taint:
    """Requests that are untrusted until they end, and their pages."""

    def __init__(self) -> None:
        self._pages: dict[str, set[int]] = {}
        self._union: set[int] | None = set()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pages

    def __bool__(self) -> bool:
        return bool(self._pages)

    @property
    def pages(self) -> AbstractSet[int]:
        """All pages. Adding pages updates the union; only the end of a request recomputes it."""
        if self._union is None:
            self._union = set().union(*self._pages.values())
        return self._union

    def add(self, request_id: str, pages: Iterable[int]) -> None:
        """Adds a request with its pages."""
        added = {page for page in pages if page}
        self._pages.setdefault(request_id, set()).update(added)
        if self._union is not None:
            self._union |= added

    def follow(self, request_id: str, given: Sequence[int]) -> None:
        """Notes pages given to a request in a step: the request becomes tainted if one of them is."""
        if request_id in self._pages or not self.pages.isdisjoint(given):
            self.add(request_id, given)

    def ended(self, request_id: str) -> None:
        """Removes a request that has ended; its pages may be given to others."""
        if self._pages.pop(request_id, None) is not None:
            self._union = None
