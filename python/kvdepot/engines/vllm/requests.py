"""What the scheduler's connector remembers of a request."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvdepot.engines.vllm.adapters import with_adapter
from kvdepot.engines.vllm.meta import GroupBlocks

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvdepot._native import Claim


@dataclass
class Offer:
    """A claim made for a request that waits for admission, and the local hit that it was made for."""

    claim: "Claim"
    local_tokens: int
    started_s: float = field(default_factory=time.monotonic)
    tokens: int = 0
    units_from_tier: int = 0


@dataclass
class RequestState:
    """One request, from its first lookup to its end.

    Attributes:
        offer: the hit that the scheduler has been told and has not used yet.
        loaded_tokens: what the depot gave beyond ``local_tokens`` when the request was admitted.
        missed_tokens: local hit of the last lookup that found nothing beyond it, -1 when there was none.
        saved_blocks: by group, leading blocks that need no dump: they were hit, loaded, dumped, or are about to be.
        load_failed: a load of this request has failed once; it is computed from now on, whatever the depot has (P2).
        adapter: digest of the LoRA adapter that it is computed with; ``None`` = it is not known, and nothing of the
            request is loaded or stored.
    """

    request: "Request"
    offer: Offer | None = None
    local_tokens: int = 0
    loaded_tokens: int = 0
    missed_tokens: int = -1
    missed_s: float = 0.0
    tier_tokens: int = 0
    saved_blocks: dict[int, int] = field(default_factory=dict)
    load_failed: bool = False
    logged: bool = False
    adapter: bytes | None = b""
    adapted: list[bytes] = field(default_factory=list)

    @property
    def hashes(self) -> Sequence[bytes]:
        """Keys of the request's hash units, as many as have been computed."""
        own: Sequence[bytes] = self.request.block_hashes
        if not self.adapter:
            return own
        if len(self.adapted) > len(own):
            self.adapted.clear()
        self.adapted += with_adapter(own[len(self.adapted) :], self.adapter)
        return self.adapted

    def drop_offer(self) -> None:
        """Gives up the hit that was offered, and its leases."""
        if self.offer is not None:
            self.offer.claim.release()
            self.offer = None


@dataclass
class RunningLoad:
    """A load under way on the workers. Keeps the claim's leases until every rank has reported (P1, P4).

    Attributes:
        pages: what is garbage if a load that its step waits for fails: its pages, and those computed on them. Known
            here, since vLLM forgets a request's pages when it is aborted or preempted, and still serves them by hash.
        readers: requests that compute on the load.
        steps: those that were planned before its report, its own among them.
    """

    request_id: str
    claim: "Claim"
    ranks_left: int
    before_forward: bool
    pages: set[int] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)
    steps: int = 0

    def follow(self, request_id: str, given: Sequence[int]) -> None:
        """A step gives pages to a request: what comes after one of the load's is computed on the load."""
        known = request_id in self.readers
        first = 0 if known else next((i for i, page in enumerate(given) if page in self.pages), None)
        if first is not None:
            self.readers.add(request_id)
            self.pages.update(page for page in given[first:] if page)


@dataclass
class HeldSaves:
    """Saves of a step that computed on KV loaded in that same step.

    What a step computed is right only if its loads were right on every rank: a failed load on one rank poisons, through
    the layers' collectives, what all ranks computed after it. So the saves wait for all ranks' reports, and are dropped
    when one failed (P1).
    """

    load_ids: set[int]
    saves: GroupBlocks
