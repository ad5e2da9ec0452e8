"""What the scheduler's connector remembers of a request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvdepot.engines.vllm.adapters import with_adapter
from kvdepot.engines.vllm.asks import Ask
from kvdepot.engines.vllm.lookup import Lookup, Miss

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class RequestState:
    """One request, from its first lookup to its end.

    Attributes:
        lookup: what the depot was asked for the request while it waits for admission; a hit that was told to the
            scheduler and is not used yet keeps its leases here.
        miss: why the last lookup found nothing beyond ``local_tokens``; ``None`` after a hit.
        loaded_tokens: what the depot gave beyond ``local_tokens`` when the request was admitted.
        asked_tokens: what the last lookup asked the depot for.
        missed_tokens: local hit of the last lookup that found nothing beyond it, -1 when there was none.
        expected_tokens: what a tier had beyond ``local_tokens`` when it gave up waiting (P9); 0 = it never did.
        saved_blocks: by group, leading blocks that need no dump: they were hit, loaded, dumped, or are about to be.
        load_failed: a load of this request has failed once; it is computed from now on, whatever the depot has (P2).
        adapter: digest of the LoRA adapter that it is computed with; ``None`` = it is not known, and nothing of the
            request is loaded or stored.
        ask: what the request itself says about loading and storing.
    """

    request: "Request"
    lookup: Lookup | None = None
    miss: Miss | None = None
    local_tokens: int = 0
    loaded_tokens: int = 0
    missed_tokens: int = -1
    missed_s: float = 0.0
    tier_tokens: int = 0
    expected_tokens: int = 0
    asked_tokens: int = 0
    saved_blocks: dict[int, int] = field(default_factory=dict)
    load_failed: bool = False
    logged: bool = False
    adapter: bytes | None = b""
    adapted: list[bytes] = field(default_factory=list)
    ask: Ask = field(default_factory=Ask)

    def is_of(self, request: "Request") -> bool:
        """Whether ``request`` is this one, or continues its tokens under its name."""
        known = self.request.block_hashes
        return request is self.request or list(request.block_hashes[: len(known)]) == list(known)

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

    def drop_lookup(self) -> None:
        """Gives up what was asked and found, and its leases."""
        if self.lookup is not None:
            self.lookup.release()
            self.lookup = None
