"""Dumps of a worker: started layer by layer or as a whole, tracked until they no longer read the engine's memory."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvdepot.engines.spans import Carrier
from kvdepot.engines.vllm.compute import ComputeOrder, ComputePoint
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.meta import Blocks, GroupBlocks
from kvdepot.engines.vllm.stats import DepotStats
from kvdepot.engines.vllm.stores import GroupStore
from kvdepot.errors import KVDepotError
from kvdepot.priority import Priority

if TYPE_CHECKING:
    from kvdepot import Task
    from kvdepot.engines.vllm.joint import JointTask
    from kvdepot.engines.vllm.request_spans import WorkerSpans

logger = connector_logger()


@dataclass(frozen=True)
class RunningDump:
    """A dump that may still read its pages.

    Attributes:
        begun_ns: when it began, in ns since the epoch, if it is traced; else 0.
        traces: traces of the requests that it is for.
    """

    task: "Task | JointTask"
    pages: frozenset[int]
    block_bytes: int
    after: list[ComputePoint] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)
    group: int = 0
    begun_ns: int = 0
    traces: list[Carrier] = field(default_factory=list)


@dataclass
class LayerDump:
    """A dump of this step of which only some shards have been submitted."""

    running: RunningDump
    shards_left: set[int]
    submitted: set[int] = field(default_factory=set)

    def submit(self, shards: set[int], after: ComputePoint) -> None:
        """Submits shards whose layers have been launched."""
        self.shards_left -= shards
        self.submitted |= shards
        self.running.after.append(after)
        for shard in sorted(shards):
            self.running.task.submit_shard(shard, wait_event=after.handle, keep=after.event)

    def read_out(self) -> None:
        """Returns when nothing reads the pages: all submitted shards have been copied, or failed at their deadline."""
        for shard in sorted(self.submitted):
            self.running.task.wait_shard(shard)


class Saves:
    """All dumps of a worker."""

    def __init__(
        self,
        stores: Mapping[int, GroupStore],
        order: ComputeOrder,
        stats: DepotStats,
        spans: "WorkerSpans | None" = None,
    ) -> None:
        self._stores = stores
        self._order = order
        self._stats = stats
        self._spans = spans
        self._running: list[RunningDump] = []
        self._by_layer: dict[tuple[int, Priority], LayerDump] = {}
        self._begun = False
        self.stopped = False
        """Whether nothing is stored any more: a forward failed, and later ones may compute on what it left (P1)."""

    def dump(self, saves: GroupBlocks) -> None:
        """Dumps whole blocks; the kernels that compute their bytes have been launched."""
        for index, blocks in saves.items():
            self._submit(index, blocks, by_layer=False)

    def submit_layer(self, layer_name: str, saves: GroupBlocks) -> None:
        """``save_kv_layer``: this layer of the step's blocks has been written."""
        if not saves:
            return
        if not self._begun:
            self._begun = True
            for index, blocks in saves.items():
                self._submit(index, blocks, by_layer=True)
        for (index, _), dump in self._by_layer.items():
            shard = self._stores[index].shard_of_layer.get(layer_name)
            if shard is not None and shard in dump.shards_left:
                dump.submit({shard}, self._order.point())

    def finish_step(self, saves: GroupBlocks) -> None:
        """Submits everything that the layers' hooks did not, and counts the dumps that have ended."""
        if self._begun:
            for dump in self._by_layer.values():
                if dump.shards_left:
                    dump.submit(set(dump.shards_left), self._order.point())
        else:
            self.dump(saves)
        self._end_step()

    def give_up_step(self) -> None:
        """Discards the dumps of a step whose forward failed: layers that never ran hold old bytes, so do not seal (P1).

        A dump that will not get all of its shards never ends. It is dropped, and the core reclaims its slots (P4).
        """
        for dump in self._by_layer.values():
            if dump.shards_left:
                dump.read_out()
                self._running = [running for running in self._running if running is not dump.running]
                self._stats.add_failures("dump", {"forward": len(dump.running.pages)})
        self._end_step()

    def _end_step(self) -> None:
        self._by_layer.clear()
        self._begun = False
        self._reap()

    def _submit(self, index: int, blocks: Blocks, by_layer: bool) -> None:
        store = self._stores.get(index)
        if self.stopped or store is None:
            return
        for priority, some in store.share.of(blocks).by_priority():
            if some.pages:
                self._begin(index, store, some, priority, by_layer)

    def _begin(self, index: int, store: GroupStore, blocks: Blocks, priority: Priority, by_layer: bool) -> None:
        after = [] if by_layer else [self._order.point()]
        try:
            task = store.begin_dump(blocks, priority) if by_layer else store.dump(blocks, after[0], priority)
        except KVDepotError as error:  # a block that is not stored is a later miss (P2)
            self._stats.add_failures("dump", {error.kind: len(blocks.pages)})
            return
        begun_ns = self._spans.dump_begun(blocks) if self._spans is not None else 0
        running = RunningDump(
            task,
            frozenset(blocks.pages),
            store.block_bytes,
            after,
            group=index,
            begun_ns=begun_ns,
            traces=blocks.traces,
        )
        if by_layer:
            self._by_layer[index, priority] = LayerDump(running, set(range(store.shard_count)))
        self._running.append(running)

    def fence(self, fresh: set[int]) -> None:
        """Returns when no dump reads a page of ``fresh`` any more (P3)."""
        for dump in self._running:
            if not dump.pages.isdisjoint(fresh) and not dump.task.done():
                self._stats.add("dump_fences")
                # Bounded by the task's own deadline: returning earlier would let the engine write under a reader.
                dump.task.wait_done()
        self._reap()

    def wait_for_all(self) -> None:
        """Returns when no dump reads the engine's pages: all have ended, within their tasks' time limit (P3)."""
        for dump in self._running:
            dump.task.wait_done()
        self._reap()

    def _reap(self) -> None:
        running = []
        for dump in self._running:
            if not dump.task.done():
                running.append(dump)
                continue
            result = dump.task.result()
            stored, seconds = len(dump.pages) - len(result.failed), time.monotonic() - dump.started_s
            self._stats.add_transfer("dump", stored, dump.block_bytes, seconds)
            self._stats.add_failures("dump", result.failures)
            if self._spans is not None:
                self._spans.dump_ended(
                    dump.begun_ns, dump.traces, dump.group, stored, dump.block_bytes, result.failures
                )
        self._running = running

    def close(self) -> None:
        """Ends all dumps: the engine's memory is freed after this."""
        self.give_up_step()
        self.wait_for_all()
