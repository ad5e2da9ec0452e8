"""One KV-cache group's store on this rank: a ``Store`` over its pages, or one for each slice of KV heads."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvdepot.engines.vllm.compute import ComputePoint
from kvdepot.engines.vllm.facts import of_version
from kvdepot.engines.vllm.joint import JointTask
from kvdepot.engines.vllm.meta import Blocks
from kvdepot.engines.vllm.options import ConnectorOptions
from kvdepot.engines.vllm.pages import GroupPages
from kvdepot.engines.vllm.shares import Share
from kvdepot.errors import KVDepotError
from kvdepot.priority import Priority

if TYPE_CHECKING:
    from kvdepot import Depot, Namespace, Store, Task


@dataclass(frozen=True)
class Stored:
    """Content of one namespace of a group.

    Attributes:
        facts: facts at the engine's start, whatever version of the weights a store is for.
        pages: location of the bytes on this rank.
        heads: KV heads of the slice, as this rank counts them; ``None`` = no slice, the rank's whole pages.
    """

    facts: str
    pages: GroupPages
    heads: range | None = None

    def of_version(self, version: str) -> "Stored":
        """Returns the same content for another version of the weights."""
        return Stored(of_version(self.facts, version), self.pages, self.heads)


@dataclass(frozen=True)
class Part:
    """A store with registered pages."""

    stored: Stored
    store: "Store"

    @staticmethod
    def open(depot: "Depot", stored: Stored, options: ConnectorOptions, owner: object) -> "Part":
        """Opens the namespace given by the facts and the pages' layout, and registers the pages."""
        pages = stored.pages
        # It stays open while the store is closed, as during the engine's sleep.
        namespace = depot.open_namespace(json.loads(stored.facts), layout=pages.layout)
        store = depot.open(namespace=namespace, cuda_device=pages.cuda_device, timeout_ms=options.timeout_ms)
        store.register_pages(pages.bases(), pages.strides(), pages.page_count, owner, sizes=pages.sizes())
        return Part(stored, store)


@dataclass(frozen=True)
class GroupStore:
    """A group's store on this rank, and the location of each layer's bytes in its blocks.

    Attributes:
        at_start: its content, with the facts of the engine's start.
        parts: the stores, one per namespace: a single one, or one for each slice of KV heads.
        share: the rank's share of the dumps.
        shard_of_layer: index of the shard that holds a layer.
    """

    at_start: tuple[Stored, ...]
    parts: tuple[Part, ...]
    share: Share
    shard_of_layer: dict[str, int]

    @staticmethod
    def open(
        depot: "Depot", held: Sequence[Stored], options: ConnectorOptions, share: Share, owner: object = None
    ) -> "GroupStore":
        """Opens the namespaces of everything held, and registers its pages.

        The core holds ``owner``, which owns the pages' memory, until its last copy has ended.
        """
        parts = tuple(Part.open(depot, stored, options, owner) for stored in held)
        return GroupStore(tuple(held), parts, share, held[0].pages.shard_of_layer())

    def of_version(self, depot: "Depot", version: str, options: ConnectorOptions, owner: object) -> "GroupStore":
        """Returns a store of the same pages for another version of the weights, and closes this one."""
        self.close()
        parts = tuple(Part.open(depot, stored.of_version(version), options, owner) for stored in self.at_start)
        moved = GroupStore(self.at_start, parts, self.share, self.shard_of_layer)
        for namespace in self.namespaces:
            namespace.close()
        return moved

    @property
    def namespaces(self) -> list["Namespace"]:
        """Namespaces of this group's pages on this rank."""
        return [part.store.namespace for part in self.parts]

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Layers with memory of their own."""
        return self.at_start[0].pages.layer_names

    @property
    def page_count(self) -> int:
        """Number of blocks of the engine's cache."""
        return self.at_start[0].pages.page_count

    @property
    def shard_count(self) -> int:
        """Number of shards of a block."""
        return len(self.at_start[0].pages.shards)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on this rank."""
        return sum(stored.pages.block_bytes for stored in self.at_start)

    def dump(self, blocks: Blocks, after: ComputePoint, priority: Priority = "normal") -> "Task | JointTask":
        """Starts a dump of whole blocks."""
        pages = np.array(blocks.pages, dtype=np.int64)
        return self._together(
            lambda store: store.dump_pages(
                blocks.hashes, pages, wait_event=after.handle, priority=priority, keep=after.event
            )
        )

    def begin_dump(self, blocks: Blocks, priority: Priority = "normal") -> "Task | JointTask":
        """Prepares a dump of blocks whose layers are written one by one."""
        pages = np.array(blocks.pages, dtype=np.int64)
        return self._together(lambda store: store.begin_dump_pages(blocks.hashes, pages, priority=priority))

    def load(self, blocks: Blocks, after: ComputePoint, patience_ms: int | None = None) -> "Task | JointTask":
        """Starts a load of whole blocks, layer by layer. ``patience_ms`` bounds the wait for blocks not in the pool."""
        pages = np.array(blocks.pages, dtype=np.int64)
        return self._together(
            lambda store: store.load_pages(
                blocks.hashes, pages, wait_event=after.handle, patience_ms=patience_ms, keep=after.event
            )
        )

    def _together(self, begin: Callable[["Store"], "Task"]) -> "Task | JointTask":
        """Starts the same task on every part. Raises an error only if nothing has started."""
        if len(self.parts) == 1:
            return begin(self.parts[0].store)
        tasks: list[Task] = []
        try:
            tasks.extend(begin(part.store) for part in self.parts)
        except KVDepotError as error:
            if not tasks:
                raise
            # Tasks that have started touch the pages, so they have to be waited for like others (P3).
            return JointTask(tasks, refused=error.kind)
        return JointTask(tasks)

    def set_decoding(self, decoding: bool) -> None:
        """Sets whether copies should leave the device's multiprocessors to the engine."""
        for part in self.parts:
            part.store.set_decoding(decoding)

    def close(self, wait_ms: int = 0) -> bool:
        """Releases the engine's memory. Returns false if a copy still uses it after ``wait_ms`` for each part."""
        ended = [part.store.close(wait_ms) for part in self.parts]
        return all(ended)


def slices(store: GroupStore) -> Iterator[tuple[range, Part]]:
    """Yields the store's parts that are slices, with their heads."""
    return ((part.stored.heads, part) for part in store.parts if part.stored.heads is not None)
