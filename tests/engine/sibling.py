"""Another connector for `MultiConnector`: stores blocks in this process's memory, with a handshake of its own.

Only for one engine in one process: scheduler and worker share ``STORE``.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

STORE: dict[bytes, list[torch.Tensor]] = {}
mode = "serves"
"""Or ``off``: finds and stores nothing; or ``fails``: offers its blocks, and fills the pages with garbage."""


@dataclass
class Hello(KVConnectorHandshakeMetadata):
    """What Nixl would send to other engines."""


@dataclass
class Plan(KVConnectorMetadata):
    """Blocks to load and to store: hash and page."""

    loads: list[tuple[bytes, int]] = field(default_factory=list)
    saves: list[tuple[bytes, int]] = field(default_factory=list)


class Sibling(KVConnectorBase_V1):
    """Loads in the step, before the forward."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_tokens = vllm_config.cache_config.block_size
        self._pages = kv_cache_config.num_blocks
        self._plan = Plan()
        self._requests: dict[str, Any] = {}
        self._caches: list[torch.Tensor] = []
        self._failed: set[int] = set()

    # Handshake: like Nixl's, it accepts only its own.

    def get_handshake_metadata(self) -> Hello:
        return Hello()

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        if not all(isinstance(one, Hello) for one in metadata.values()):
            raise ValueError(f"Sibling expects its own handshake, got {metadata}")

    # Scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._requests[request.request_id] = request
        if mode == "off":
            return 0, False
        most = (request.num_tokens - 1) // self._block_tokens
        found = next((i for i, one in enumerate(request.block_hashes[:most]) if one not in STORE), most)
        return max(0, found * self._block_tokens - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        (pages,) = blocks.get_block_ids()
        if num_external_tokens:
            most = (request.num_tokens - 1) // self._block_tokens
            end = next((i for i, one in enumerate(request.block_hashes[:most]) if one not in STORE), most)
            first = end - num_external_tokens // self._block_tokens
            self._plan.loads += [(request.block_hashes[i], pages[i]) for i in range(first, end)]

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        plan, self._plan = self._plan, Plan()
        if mode == "off":
            return plan
        for new in scheduler_output.scheduled_new_reqs:
            end = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            hashes = self._requests[new.req_id].block_hashes[: end // self._block_tokens]
            plan.saves += [(one, page) for one, page in zip(hashes, new.block_ids[0], strict=False) if one not in STORE]
        return plan

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._requests.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        return True  # keeps what it has, so that it has more than the depot

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for cache in kv_caches.values():
            dim = next(d for d, n in enumerate(cache.shape) if n >= self._pages and n % self._pages == 0)
            self._caches.append(cache.movedim(dim, 0).unflatten(0, (self._pages, -1)))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for block_hash, page in self._get_connector_metadata().loads:
            for cache, kept in zip(self._caches, STORE[block_hash], strict=True):
                cache[page].copy_(kept if mode == "serves" else torch.full_like(kept, 3.0))
            if mode == "fails":
                self._failed.add(page)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        if mode == "serves":
            for block_hash, page in self._get_connector_metadata().saves:
                STORE[block_hash] = [cache[page].clone() for cache in self._caches]

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed
