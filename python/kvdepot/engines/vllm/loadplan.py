"""Hits that have become loads: which block goes to which page, and the leases until every rank has reported."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvdepot.engines.vllm.groups import Geometry
from kvdepot.engines.vllm.lookup import release_claim
from kvdepot.engines.vllm.meta import Blocks, GroupBlocks

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from kvdepot import Claim
    from kvdepot.claim import TierReads
    from kvdepot.engines.vllm.request_spans import ClaimSpans


@dataclass
class LeasedLoad:
    """A load in flight on the workers. Holds the claim's leases until every rank has reported (P1, P4).

    Attributes:
        pages: pages that become garbage if a load that its step waits for fails: its own, and those computed on them.
            Tracked here, because vLLM forgets a request's pages on abort or preemption, but still serves them by hash.
        readers: requests that compute on the load.
        steps: number of steps that were planned before its report, its own included.
        span: its span, which ends with it; ``None`` = there is no tracer provider.
        claim_spans: spans of its claim; ``None`` = there is no tracer provider.
        from_tier: whether a part of the hit came from below the pool.
    """

    request_id: str
    claim: "Claim"
    before_forward: bool
    pages: set[int] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)
    steps: int = 0
    span: "Span | None" = None
    claim_spans: "ClaimSpans | None" = None
    from_tier: bool = False

    def release(self) -> Sequence["TierReads"]:
        """Drops the leases. Returns what came from each tier for a hit that was not in the pool."""
        return release_claim(self.claim, self.claim_spans, tells_reads=self.from_tier)

    def follow(self, request_id: str, given: Sequence[int]) -> None:
        """Notes pages given to a request in a step: those after one of the load's pages are computed on the load."""
        known = request_id in self.readers
        first = 0 if known else next((i for i, page in enumerate(given) if page in self.pages), None)
        if first is not None:
            self.readers.add(request_id)
            self.pages.update(page for page in given[first:] if page)


def planned_blocks(
    geometry: Geometry, hashes: Sequence[bytes], page_ids: Sequence[list[int]], begin_tokens: int, end_tokens: int
) -> tuple[GroupBlocks, set[int]]:
    """Returns the blocks to copy for a hit from ``begin_tokens`` to ``end_tokens``, and the pages that depend on it.

    Those are the hit's own pages and all later ones, which are computed on it.
    """
    plan: GroupBlocks = {}
    dependent: set[int] = set()
    for group in geometry.groups:
        wanted = Blocks()
        begin, end = begin_tokens // group.block_tokens, end_tokens // group.block_tokens
        for index in range(begin, end):
            page = page_ids[group.index][index]
            if page != 0:  # the null block: before the window, never read
                wanted.add(hashes[(index + 1) * group.hashes_per_block - 1], page)
        if wanted.pages:
            plan[group.index] = wanted
        dependent.update(page for page in page_ids[group.index][begin:] if page)
    return plan, dependent
