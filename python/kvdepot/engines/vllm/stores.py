"""One KV-cache group's store on this rank: the core's ``Store`` over the group's pages."""

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvdepot.engines.vllm.compute import ComputePoint
from kvdepot.engines.vllm.facts import of_version
from kvdepot.engines.vllm.meta import Blocks
from kvdepot.engines.vllm.options import ConnectorOptions
from kvdepot.engines.vllm.pages import GroupPages

if TYPE_CHECKING:
    from kvdepot._native import Depot, Namespace, Store, Task


@dataclass(frozen=True)
class GroupStore:
    """A store whose pages are registered, and where each layer's bytes are in its blocks.

    ``facts`` are those of the engine's start, whatever version of the weights the store is for.
    """

    store: "Store"
    pages: GroupPages
    facts: str
    writes: bool
    shard_of_layer: dict[str, int]

    @staticmethod
    def open(
        depot: "Depot", facts: str, pages: GroupPages, options: ConnectorOptions, writes: bool, owner: object = None
    ) -> "GroupStore":
        """Opens the namespace that ``facts`` and the pages' layout make, and registers the pages.

        The core holds ``owner``, whose memory the pages are, until its last copy has ended.
        """
        namespace = depot.open_namespace(facts, json.dumps(pages.layout))
        copy_json = options.copy_json(pages.cuda_device)
        store = depot.store(namespace, timeout_ms=options.timeout_ms, copy_json=copy_json)
        store.register_pages(pages.bases(), pages.strides(), pages.page_count, owner)
        return GroupStore(store, pages, facts, writes, pages.shard_of_layer())

    def of_version(self, depot: "Depot", version: str, options: ConnectorOptions, owner: object) -> "GroupStore":
        """The same pages in the namespace of another version of the weights; this store ends."""
        self.close()
        store = GroupStore.open(depot, of_version(self.facts, version), self.pages, options, self.writes, owner)
        return replace(store, facts=self.facts)

    @property
    def namespace(self) -> "Namespace":
        """The namespace of this group's pages on this rank."""
        return self.store.namespace

    def dump(self, blocks: Blocks, after: ComputePoint) -> "Task":
        """Begins to store whole blocks."""
        pages = np.array(blocks.pages, dtype=np.int64)
        return self.store.dump_pages(blocks.hashes, pages, wait_event=after.handle, keep=after.event)

    def begin_dump(self, blocks: Blocks) -> "Task":
        """Prepares to store blocks whose layers are written one after the other."""
        return self.store.begin_dump_pages(blocks.hashes, np.array(blocks.pages, dtype=np.int64))

    def load(self, blocks: Blocks, after: ComputePoint, patience_ms: int | None = None) -> "Task":
        """Begins to load whole blocks, layer after layer; what is not in the pool is waited for so long."""
        pages = np.array(blocks.pages, dtype=np.int64)
        return self.store.load_pages(
            blocks.hashes, pages, wait_event=after.handle, patience_ms=patience_ms, keep=after.event
        )

    def set_decoding(self, decoding: bool) -> None:
        """Says whether copies should leave the device's multiprocessors to the engine."""
        self.store.set_decoding(decoding)

    def close(self, wait_ms: int = 0) -> bool:
        """Ends the use of the engine's memory; false when a copy still uses it after ``wait_ms``."""
        return self.store.close(wait_ms)
