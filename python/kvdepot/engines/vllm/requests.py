"""State of a request in the scheduler's connector."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvdepot.engines.vllm.adapters import Inquiry, block_keys, is_key_list_of, with_adapter
from kvdepot.engines.vllm.asks import Ask
from kvdepot.engines.vllm.lookup import Lookup, Miss
from kvdepot.engines.vllm.meta import AdapterName, AdapterUse
from kvdepot.engines.vllm.shared_loads import Wait

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvdepot.engines.vllm.request_spans import RequestTrace


@dataclass
class RequestState:
    """One request, from its first lookup to its end.

    Attributes:
        lookup: the claim of a request that waits for admission; a hit that was reported to the scheduler but is not
            used yet holds its leases here.
        miss: why the last lookup found nothing beyond ``local_tokens``; ``None`` after a hit.
        waits_since_s: when a lookup began that was dropped before it settled; ``None`` = the next one is the first.
        share: its wait for another request's load of the same prefix; ``None`` = it has not waited yet.
        loaded_tokens: tokens loaded beyond ``local_tokens`` when the request was admitted.
        asked_tokens: tokens that the last lookup asked the depot for.
        missed_tokens: local hit of the last lookup that found nothing beyond it, -1 if there was none.
        expected_tokens: tokens that a tier had beyond ``local_tokens`` when the wait was abandoned (P9); 0 = it never
            was.
        saved_blocks: by group, leading blocks that need no dump: they were hit, loaded, dumped, or are about to be.
        ran: whether a step has computed it since vLLM last asked for its hit. If it then starts again, it is a session
            of streaming input, which goes on with its own KV.
        miss_counted: whether it is counted as a miss.
        load_failed: a load of this request has failed once; from now on it is computed, whatever the depot has (P2).
        adapter: digest of its LoRA adapter; ``None`` = unknown, and nothing of the request is loaded or stored.
        inquiry: look at the adapter's files that has not ended when the request was last asked about; else ``None``.
        adapter_use: what the workers are told of the adapter; ``None`` = the request has none.
        ask: the request's own limits for loading and storing.
        trace: what its spans share; ``None`` = this process has no tracer provider.
    """

    request: "Request"
    lookup: Lookup | None = None
    miss: Miss | None = None
    waits_since_s: float | None = None
    share: Wait | None = None
    local_tokens: int = 0
    loaded_tokens: int = 0
    missed_tokens: int = -1
    missed_s: float = 0.0
    tier_tokens: int = 0
    expected_tokens: int = 0
    asked_tokens: int = 0
    saved_blocks: dict[int, int] = field(default_factory=dict)
    ran: bool = False
    miss_counted: bool = False
    load_failed: bool = False
    logged: bool = False
    adapter: bytes | None = b""
    inquiry: Inquiry | None = None
    adapter_use: AdapterUse | None = None
    keys: list[bytes] = field(default_factory=list)
    ask: Ask = field(default_factory=Ask)
    trace: "RequestTrace | None" = None

    def is_of(self, request: "Request") -> bool:
        """Whether ``request`` is this one, or continues its tokens under its name."""
        known = self.request.block_hashes
        return request is self.request or list(request.block_hashes[: len(known)]) == list(known)

    @property
    def hashes(self) -> Sequence[bytes]:
        """Keys of the request's hash units, as many as have been computed."""
        own: Sequence[bytes] = self.request.block_hashes
        if not is_key_list_of(own, self.keys):
            self.keys.clear()
        new = own[len(self.keys) :]
        self.keys += with_adapter(new, self.adapter) if self.adapter else block_keys(new)
        return self.keys

    @property
    def adapter_name(self) -> AdapterName | None:
        """The adapter whose change ends all use of the request's KV."""
        return self.adapter_use[:2] if self.adapter_use is not None else None

    def follow_inquiry(self) -> None:
        """Takes the answer to the inquiry, if there is one. Until then the request has no keys, so it may come late."""
        if self.inquiry is None or self.adapter_use is None or (found := self.inquiry.found) is None:
            return
        self.inquiry = None
        self.adapter, self.adapter_use = found.digest or None, self.adapter_use._replace(files=found.files)
        self.keys.clear()

    def drop_lookup(self) -> None:
        """Drops the lookup and its leases."""
        if self.lookup is not None:
            self.lookup.release()
            self.lookup = None
