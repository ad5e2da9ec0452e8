"""Messages between the scheduler's connector and the workers'. Everything here is pickled once per step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvdepot.engines.spans import Carrier
from kvdepot.priority import Priority


@dataclass
class Blocks:
    """Blocks of one KV-cache group: ``hashes[i]`` is, or will be, in page ``pages[i]`` of the group's layers.

    Attributes:
        traces: traces of the requests that the blocks are stored for, if they are sampled.
        priorities: priorities with which blocks are stored, by index, where it is not ``normal``.
    """

    hashes: list[bytes] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    traces: list[Carrier] = field(default_factory=list)
    priorities: dict[int, Priority] = field(default_factory=dict)

    def add(self, block_hash: bytes, page: int, priority: Priority = "normal") -> None:
        """Adds one block."""
        if priority != "normal":
            self.priorities[len(self.hashes)] = priority
        self.hashes.append(block_hash)
        self.pages.append(page)

    def at(self, indices: Sequence[int]) -> "Blocks":
        """Returns the blocks at these indices, in their order."""
        hashes, pages = [self.hashes[index] for index in indices], [self.pages[index] for index in indices]
        known = self.priorities
        priorities = {to: known[index] for to, index in enumerate(indices) if index in known} if known else {}
        return Blocks(hashes, pages, self.traces, priorities)

    def by_priority(self) -> "Iterator[tuple[Priority, Blocks]]":
        """Yields the blocks of each priority that some have."""
        if not self.priorities:
            yield "normal", self
            return
        indices: dict[Priority, list[int]] = {}
        for index in range(len(self.hashes)):
            indices.setdefault(self.priorities.get(index, "normal"), []).append(index)
        for priority, some in indices.items():
            yield priority, self.at(some)

    def extend(self, other: "Blocks") -> None:
        """Adds all blocks of ``other``."""
        self.priorities |= {len(self.hashes) + index: priority for index, priority in other.priorities.items()}
        self.hashes += other.hashes
        self.pages += other.pages
        self.traces += other.traces


GroupBlocks = dict[int, Blocks]
"""Blocks by the group's index in ``KVCacheConfig.kv_cache_groups``."""


@dataclass
class Load:
    """One request's hit, to be copied into the pages that the scheduler has allocated for it.

    Attributes:
        trace: context of the load's span; ``None`` = the request is not traced.
    """

    load_id: int
    request_id: str
    before_forward: bool
    blocks: GroupBlocks
    trace: Carrier | None = None


AdapterName = tuple[str, str]
"""A LoRA adapter's name and path: what vLLM's block hashes have of it."""


class AdapterUse(NamedTuple):
    """A LoRA adapter as requests of a step use it.

    Attributes:
        number: its ``lora_int_id``, which vLLM keeps when it replaces the adapter in place.
        files: digest of the content that the requests' keys stand for, see ``adapter_files.content_digest``; empty =
            unknown, and nothing of the requests is stored.
    """

    name: str
    path: str
    number: int
    files: bytes


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Work of one engine step.

    Attributes:
        fresh_pages: pages that this step or its loads may overwrite; dumps that still read one are waited for (P3).
        late_saves: saves of an earlier step that were held back. Their pages still hold that step's bytes when the
            worker sees this, because it processes them before anything of this step.
        saves: blocks that this step's forward completes.
        computes: whether the step has a forward.
        decoding: whether the step decodes for any request.
        witness: number that every rank reports back with this step, 0 = none. It tells the scheduler that another
            connector's loads, which this step computed on, have ended.
        generation: generation of the weights' version, see ``versions``; the step's loads and saves belong to it.
        version: version of the weights; ``None`` while unknown, then the step has no loads and no saves.
        timed: number that every rank reports back when the step has ended, to measure its duration; 0 = none.
        examine: whether the workers are asked for a digest of their weights.
        adapters: LoRA adapters that the step computes with.
        adapted: number that every rank reports back when it has compared these with what is in its memory, 0 = none.
            Saves of requests with an adapter wait for it.
    """

    fresh_pages: list[int] = field(default_factory=list)
    late_saves: GroupBlocks = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    saves: GroupBlocks = field(default_factory=dict)
    computes: bool = True
    decoding: bool = False
    witness: int = 0
    timed: int = 0
    generation: int = 0
    version: str | None = ""
    examine: bool = False
    adapters: list[AdapterUse] = field(default_factory=list)
    adapted: int = 0


@dataclass
class RankNamespaces:
    """A worker's findings at its start: namespaces of each group's pages on its rank, or why it cannot take part.

    Attributes:
        canonical: by group, one or one for each slice of KV heads; a group without layers on this rank (pipeline
            parallelism) is absent.
        broken: reason for which the connector has to stay off on all ranks; empty if there is none.
        rank: index of the worker in the engine.
        weights: digest of the weights in its memory; empty = unknown.
        named: whether the namespaces' facts distinguish the weights from others.
        node: the machine that the worker runs on; empty = unknown.
    """

    canonical: dict[int, tuple[str, ...]] = field(default_factory=dict)
    broken: str = ""
    rank: int = 0
    weights: str = ""
    named: bool = True
    node: str = ""


@dataclass
class LoadReport(KVConnectorWorkerMetadata):
    """Loads that have ended, with the number of ranks that report it, and loads that failed on any rank.

    Attributes:
        done: number of ranks by load, or by a step's ``witness`` or ``adapted``.
        broken: why a rank cannot take part, found later than at its start; empty if there is no reason.
        ranks: findings of ranks at their start, each reported once, with the first step. vLLM's handshake would be
            faster, but `MultiConnector` hands one connector's handshake to all of them.
        generation: generation of the doubt that ``weights`` answers.
        weights: digest of the weights in a rank's memory, by rank; empty = unknown.
        timed: number of the step, if it is to be measured.
        moved: generation in which a rank noticed an unannounced change of its weights; else ``None``.
        moved_unused: whether nothing was computed or loaded before that, so that no KV of the earlier weights is left.
        changed_adapters: LoRA adapters that a rank did not compute with as their requests' keys say.
    """

    done: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    broken: str = ""
    ranks: list[RankNamespaces] = field(default_factory=list)
    generation: int = 0
    weights: dict[int, str] = field(default_factory=dict)
    moved: int | None = None
    moved_unused: bool = False
    timed: int = 0
    changed_adapters: set[AdapterName] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "LoadReport":
        """Merges the reports of two ranks."""
        assert isinstance(other, LoadReport)  # noqa: S101 - vLLM gives a connector its own reports
        done = dict(self.done)
        for load_id, ranks in other.done.items():
            done[load_id] = done.get(load_id, 0) + ranks
        generation = max(self.generation, other.generation)
        weights = {}
        for report in (self, other):
            if report.generation == generation:
                weights.update(report.weights)
        moved = [report for report in (self, other) if report.moved is not None]
        return LoadReport(
            done=done,
            failed=self.failed | other.failed,
            broken=self.broken or other.broken,
            ranks=self.ranks + other.ranks,
            generation=generation,
            weights=weights,
            moved=max((report.moved for report in moved if report.moved is not None), default=None),
            moved_unused=bool(moved) and all(report.moved_unused for report in moved),
            timed=max(self.timed, other.timed),
            changed_adapters=self.changed_adapters | other.changed_adapters,
        )
