"""Loads of a worker: those that the step's forward waits for, and those between steps."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvdepot.engines.vllm.compute import NOW, ComputeOrder, ComputePoint
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.meta import Blocks, GroupBlocks, Load, LoadReport
from kvdepot.engines.vllm.options import ConnectorOptions
from kvdepot.engines.vllm.stats import DepotStats
from kvdepot.engines.vllm.stores import GroupStore
from kvdepot.errors import KVDepotError

if TYPE_CHECKING:
    from kvdepot import Task
    from kvdepot.engines.vllm.joint import JointTask
    from kvdepot.engines.vllm.request_spans import WorkerSpans

logger = connector_logger()

CLOSE_GRACE_MS = 5_000
"""Milliseconds that closing waits for loads beyond a task's time limit: on a hung device, one may never end."""


STEP_PATIENCE_MS = 250
"""Milliseconds that a step waits for blocks that are unexpectedly not in the pool; after that they are recomputed."""


@dataclass
class Copy:
    """One task of a load, and the pages it writes; ``task`` is None if it could not be started.

    Attributes:
        late: whether a layer went on without it: however the task ends, the step has computed on old bytes (P1).
    """

    group: int
    task: "Task | JointTask | None"
    pages: tuple[int, ...]
    after: ComputePoint = NOW
    late: bool = False
    started_s: float = field(default_factory=time.monotonic)

    def done(self) -> bool:
        """Returns whether nothing is written any more."""
        return self.task is None or self.task.done()


@dataclass
class LoadBetweenSteps:
    """A request's load that no step waits for, and its copies on this rank."""

    load: Load
    copies: list[Copy] = field(default_factory=list)


class Loads:
    """All loads of a worker."""

    def __init__(
        self,
        stores: Mapping[int, GroupStore],
        options: ConnectorOptions,
        stats: DepotStats,
        recompute_by_block: bool,
        order: ComputeOrder,
        spans: "WorkerSpans | None" = None,
    ) -> None:
        self._order = order
        self._spans = spans
        self._stores = stores
        self._timeout_ms = options.timeout_ms
        self._stats = stats
        self._recompute_by_block = recompute_by_block
        self._between_steps: list[LoadBetweenSteps] = []
        self._before_forward: list[Load] = []
        self._copies: list[Copy] = []
        self._given_up: list[Copy] = []
        self._hooked: set[str] = set()
        self._failed_requests: set[str] = set()
        self._failed_pages: set[int] = set()
        self._report = LoadReport()
        self.refused = False
        """Whether every load fails immediately, because loaded bytes have not been proven correct (P1)."""

    def start(self, loads: list[Load]) -> None:
        """Starts the step's loads. For loads before the forward, waits for layers that have no hook to wait in."""
        self._before_forward = [load for load in loads if load.before_forward]
        if self._spans is not None:
            self._spans.loads_begun(loads)
        if self._before_forward:
            # One task for all requests, so that each layer waits once.
            together: GroupBlocks = {}
            for load in self._before_forward:
                for index, blocks in load.blocks.items():
                    together.setdefault(index, Blocks()).extend(blocks)
            self._copies = [self._copy(index, blocks, STEP_PATIENCE_MS) for index, blocks in together.items()]
            self._wait_for_silent_layers()
        for load in loads:
            if not load.before_forward:
                copies = [self._copy(index, blocks, None) for index, blocks in load.blocks.items()]
                self._between_steps.append(LoadBetweenSteps(load, copies))

    def _copy(self, index: int, blocks: Blocks, patience_ms: int | None) -> Copy:
        pages = tuple(blocks.pages)
        store = self._stores.get(index)
        if store is None and not self.refused:  # a pipeline stage without layers of this group
            return Copy(index, None, ())
        self._stats.add("loads")
        if store is None or self.refused:
            self._stats.add_failures("load", {"unproven": len(pages)})
            return Copy(index, None, pages)
        # Kernels of an earlier step may still use the pages on behalf of their previous owners.
        after = self._order.point()
        try:
            task = store.load(blocks, after, patience_ms)
        except KVDepotError as error:
            self._stats.add_failures("load", {error.kind: len(pages)})
            return Copy(index, None, pages)
        return Copy(index, task, pages, after)

    def _wait_for_silent_layers(self) -> None:
        """Waits for layers without a hook: an indexer's cache, or all layers if a graph is replayed.

        Earlier steps show which layers have one; until one has been seen, this waits for everything.
        """
        for copy in self._copies:
            if copy.task is not None and self._order.immediate:
                # Copying threads would compete with the computing threads for processors: each operator waits for the
                # slowest of them, which costs more time than the overlap saves.
                copy.late = not copy.task.wait_done(self._timeout_ms)
            elif copy.task is not None:
                shards = self._stores[copy.group].shard_of_layer
                for shard in sorted({shard for name, shard in shards.items() if name not in self._hooked}):
                    self._wait_for_shard(copy, copy.task, shard)

    def wait_for_layer(self, layer_name: str) -> None:
        """``wait_for_layer_load``: returns when the layer's pages are in place, or known to have failed."""
        self._hooked.add(layer_name)
        for copy in self._copies:
            shard = self._stores[copy.group].shard_of_layer.get(layer_name) if copy.task is not None else None
            if shard is not None and copy.task is not None:
                self._wait_for_shard(copy, copy.task, shard)

    def _wait_for_shard(self, copy: Copy, task: "Task | JointTask", shard: int) -> None:
        """Waits for one shard. On a device, the kernels launched from now on wait, not this thread (P3)."""
        if copy.late:  # its pages will be recomputed, so there is nothing more to wait for
            return
        stream = self._order.stream()
        if stream is None:
            copy.late = not task.wait_shard(shard, timeout_ms=self._timeout_ms)
        else:
            copy.late = not task.wait_shard_on(shard, stream=stream, timeout_ms=self._timeout_ms)

    def finish_before_forward(self) -> None:
        """After the forward: reports which of the step's loads were complete."""
        if not self._before_forward:
            return
        bad: set[int] = set()
        for copy in self._copies:
            if copy.task is not None and (copy.late or not copy.task.wait_done(self._timeout_ms)):
                bad.update(copy.pages)
                self._give_up(copy)
            else:
                bad |= self._count(copy)
        for load in self._before_forward:
            pages = {page for blocks in load.blocks.values() for page in blocks.pages}
            self._end(load, pages & bad)
        self._before_forward, self._copies = [], []

    def finished(self) -> set[str]:
        """Returns the requests whose loads between steps have ended, successfully or not."""
        ended = [running for running in self._between_steps if all(copy.done() for copy in running.copies)]
        if not ended:
            return set()
        self._between_steps = [running for running in self._between_steps if not any(running is e for e in ended)]
        for running in ended:
            self._end(running.load, set().union(*(self._count(copy) for copy in running.copies)))
        return {running.load.request_id for running in ended}

    def _end(self, load: Load, bad: set[int]) -> None:
        self._report.done[load.load_id] = 1
        if self._spans is not None:
            block_bytes = {index: store.block_bytes for index, store in self._stores.items()}
            self._spans.load_ended(load, len(bad), block_bytes)
        if bad:
            logger.warning("request %s: %d blocks failed to load; vLLM recomputes them", load.request_id, len(bad))
            self._report.failed.add(load.load_id)
            if self._recompute_by_block:
                self._failed_pages |= bad
            else:
                self._failed_requests.add(load.request_id)

    def _count(self, copy: Copy) -> set[int]:
        """Counts a copy that is done. Returns the pages that do not hold their block."""
        if copy.task is None:
            return set(copy.pages)
        result = copy.task.result()
        bad = {copy.pages[index] for index in result.failed}
        loaded, seconds = len(copy.pages) - len(bad), time.monotonic() - copy.started_s
        self._stats.add_transfer("load", loaded, self._stores[copy.group].block_bytes, seconds)
        self._stats.add_failures("load", result.failures)
        return bad

    def _give_up(self, copy: Copy) -> None:
        """Abandons a task that may still write: its pages stay fenced until it has ended."""
        self._stats.add_failures("load", {"timeout": len(copy.pages)})
        self._given_up.append(copy)

    def fence(self, fresh: set[int]) -> None:
        """Returns when no abandoned load writes to a page of ``fresh`` any more."""
        for copy in self._given_up:
            if copy.task is not None and not fresh.isdisjoint(copy.pages):
                copy.task.wait_done()
        self._given_up = [copy for copy in self._given_up if not copy.done()]

    def close(self) -> bool:
        """Waits for all loads. Returns false if one may still write to the engine's memory, which must then stay."""
        copies = (*self._copies, *self._given_up, *(c for running in self._between_steps for c in running.copies))
        deadline = time.monotonic() + (self._timeout_ms + CLOSE_GRACE_MS) / 1e3
        for copy in copies:
            if copy.task is not None:
                copy.task.wait_done(max(0, round((deadline - time.monotonic()) * 1e3)))
        self._copies, self._given_up, self._between_steps = [], [], []
        return all(copy.done() for copy in copies)

    def take_failed_requests(self) -> set[str]:
        """Returns requests that vLLM has to recompute completely, since the last call."""
        taken, self._failed_requests = self._failed_requests, set()
        return taken

    def take_failed_pages(self) -> set[int]:
        """Returns pages from which on vLLM has to recompute, since the last call."""
        taken, self._failed_pages = self._failed_pages, set()
        return taken

    def report_broken(self, why: str) -> None:
        """Makes the scheduler disable the connector on all ranks."""
        self._report.broken = why

    def report_weights(self, generation: int, rank: int, digest: str) -> None:
        """Reports the digest of the weights in this rank's memory."""
        self._report.generation, self._report.weights = generation, {rank: digest}

    def report_moved(self, generation: int, *, unused: bool) -> None:
        """Reports an unannounced change of this rank's weights. ``unused``: before anything was computed or loaded."""
        self._report.moved, self._report.moved_unused = generation, unused

    def wait_for_all(self) -> None:
        """Returns when no load writes to the engine's pages: all have ended, within their tasks' time limit (P3)."""
        for copy in (*self._copies, *self._given_up, *(c for running in self._between_steps for c in running.copies)):
            if copy.task is not None:
                copy.task.wait_done()

    def take_report(self) -> LoadReport | None:
        """Returns the loads that have ended on this rank since the last call."""
        if self._report == LoadReport():
            return None
        taken, self._report = self._report, LoadReport()
        return taken
