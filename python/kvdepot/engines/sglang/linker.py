"""kvdepot as SGLang's external linker (``--unified-cache-external-linker-backend dynamic``), 0.5.23.

SGLang reads and writes pages of its device pools directly, without a host pool of its own. It treats a failed lookup or
offload as a miss, but aborts a request whose load fails after it was accepted. So a hit is what is verified and leased
in the depot's pool, and it stays leased until it was loaded.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from kvdepot.config import KVDepotConfig
from kvdepot.engines.clearing import UNSETTLED, Clearing
from kvdepot.engines.resets import Resets
from kvdepot.engines.sglang import engine
from kvdepot.engines.sglang.batches import Batch, Batches
from kvdepot.engines.sglang.device_pages import DevicePages
from kvdepot.engines.sglang.device_pools import device_pool_group
from kvdepot.engines.sglang.facts import engine_facts, pool_facts, refuse_unsupported
from kvdepot.engines.sglang.guard import Guard
from kvdepot.engines.sglang.hits import KV, TRAILING_PAGES
from kvdepot.engines.sglang.keys import page_hashes
from kvdepot.engines.sglang.options import read_linker_config
from kvdepot.engines.sglang.patience import Patience
from kvdepot.engines.sglang.report import report_for
from kvdepot.engines.sglang.room import CLAIM_S, Room
from kvdepot.engines.sglang.worker import Worker
from kvdepot.errors import BlockNotFoundError, ConfigError, DepotTimeoutError, is_failure

logger = logging.getLogger("sglang.kvdepot")

OFFLOADS_MAX = 1024
"""Offloads that may wait to be copied; later ones are reported as failed, and SGLang offers them again."""
COPY_S = 10.0
"""Seconds that a dump or load may take, all in memory: longer than in HiCache, since a failed load aborts a request."""
FULL_S = 1.0
"""Seconds after its offer for which an offload is retried while the depot is busy or full. Until SGLang has the result,
it evicts none of the pages, and those of later offloads wait with them."""
QUIET_S = 2 * COPY_S + 1.0
"""Seconds that a reset waits for copies in flight, both directions together. Each begins within ``COPY_S``, and ends
within another."""
MISSES_KEPT = 256
"""Questions without a hit that are remembered."""
LATE_LOAD = "a load has not ended {:.0f} s after a flush, and may write into pages of later requests: {}"
LATE_ALONE = (
    "restart SGLang if their answers matter; nothing is loaded until it has ended, nor stored until the next flush"
)
LATE_RANK = (
    "the other ranks would store what they compute from these pages, so rank {} of {} ends SGLang: start it again, and "
    "check the device of that rank"
)
MEMORY_SAVER = (
    "--enable-memory-saver: SGLang releases the memory of its pages before it ends the linker's copies: start without "
    "it, or use KVDepotHiCache"
)
REMEDY = "restart SGLang"
"""What to do after an update of the weights in place."""


@dataclass(frozen=True)
class Load:
    """A batch of loads: hashes and device indices of each pool, in the order of the requests."""

    batch: Batch
    owners: tuple[bytes, ...]
    pools: dict[str, tuple[list[bytes], list[Any]]]
    ready: tuple[Any, ...]


@dataclass(frozen=True)
class Offload:
    """Pages to store after the events; no pools = a failure that is reported when its turn comes.

    No copy begins after ``until_s``, and none that found the depot busy or full after ``again_until_s``.
    """

    generation: int
    pools: tuple[tuple[str, list[bytes], Any], ...] | None
    events: tuple[Any, ...]
    until_s: float
    again_until_s: float


@dataclass(frozen=True)
class Question:
    """What a request asked for by SGLang's keys, their hashes, and how long its hit is; 0 for a miss.

    ``waited_s`` is what ``Patience`` takes back when SGLang loads the hit.
    """

    keys: tuple[str, ...]
    hashes: list[bytes]
    windows: dict[str, int]
    pages: int
    waited_s: float


class KVDepotLinker(UnifiedCacheLinker):
    """Links SGLang's device pools to the node's depot.

    SGLang's scheduler calls everything here on its own thread; two more threads copy.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Attaches to the depot.

        Args:
            server_args: SGLang's arguments.
            params: its ``CacheInitParams``.
            components: components of its prefix tree.
            extra_config: ``linker_extra_config``: our keys.
            forward_stream: stream that writes the device pools.

        Raises:
            ConfigError: a key is wrong, or the model's KV cannot be distinguished from another's, or its pools cannot
                be used, or SGLang may release their memory.
        """
        self.forward_stream = forward_stream
        if getattr(server_args, "enable_memory_saver", False):
            raise ConfigError(MEMORY_SAVER)
        options = read_linker_config(extra_config)
        cache = params.token_to_kv_pool_allocator.get_kvcache()
        self._group = device_pool_group(cache, params, components)
        self.pools = self._group.entry_map
        ranks = engine.linker_ranks(params, replicated=self._group.rank_replicated)
        refuse_unsupported(ranks)
        if ranks.dcp_size > 1:
            raise ConfigError("--attn-dcp-size: the linker does not know which rank has which tokens: set it to 1")
        self._writes = not ranks.is_mla_model or ranks.tp_rank == 0
        rank = (ranks.pp_rank * ranks.attn_cp_size + ranks.attn_cp_rank) * ranks.tp_size + ranks.tp_rank
        count = ranks.tp_size * ranks.pp_size * ranks.attn_cp_size
        # Only a rank that is alone may refuse a load, or stop storing: the others would not know.
        self._alone = count == 1
        self._late = LATE_ALONE if self._alone else LATE_RANK.format(rank, count)
        self._counters = report_for(engine.server_arguments())
        self._guard = Guard(self._counters, REMEDY)
        self._resets = Resets()
        self._closed = False
        self._lock = threading.Lock()
        self._results: deque[bool] = deque()
        self._queued: dict[str, list[Any]] = {}
        self._questions: dict[str, Question] = {}
        self._patience = Patience(
            wait_s(options.config), is_limited=options.config.load_policy == "faster", is_alone=self._alone
        )
        arguments = engine.server_arguments()
        self._room = Room(options.config, self._counters, ranks=engine.ranks_of_node(arguments, ranks), call_s=COPY_S)
        self._clearing = Clearing(self._resets, self._room.reset)
        self._pages = {_text(name): DevicePages.of(entry, _text(name)) for name, entry in self.pools.items()}
        facts = engine_facts(options)
        for name, pages in self._pages.items():
            self._room.open(name, pages, {**pool_facts(facts, name, pages, ranks), "layers": list(pages.layers)})
        self._counter = LayerWiseLoadCounter(self._group.num_layers)
        self._batches = Batches(self._counter, self._group.num_layers)
        self.layer_done_counter = self._counter
        if "mamba" in self._pages:
            params.req_to_token_pool.register_layer_transfer_counter(self._counter)
        self._loads: Worker[Load] = Worker("kvdepot-load", self._load)
        self._offloads: Worker[Offload] = Worker("kvdepot-offload", self._offload)

    # Lookups.

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Returns the prefix lengths, in pages, that can be loaded. The longest is leased in the depot's pool."""
        expanded = self._group.resolve_transfers(transfers)
        keys = next((one.keys for one in transfers if _text(one.name) == KV), None)
        if not expanded or not keys:
            return []
        windows = {
            _text(one.name): max(1, len(one.keys)) if _text(one.hit_policy) == TRAILING_PAGES else 0 for one in expanded
        }
        found = self._guard.answered("lookup", len(keys), lambda: self._held(rid, tuple(keys), windows), 0)
        if not found:
            return []
        # The windows at the ends of shorter lengths are not held.
        return [found] if any(windows.values()) else list(range(1, found + 1))

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Queues a hit for the next batch. Returns false if it is to be computed after all."""
        expanded = self._group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        if not expanded:
            return False
        pages = max(len(one.keys) for one in expanded)
        if not self._guard.answered("load", pages, lambda: self._still_held(rid, pages), missed=False) and self._alone:
            self._counters.trouble("load_refused", "a hit is no longer held, and is computed", pages)
            return False
        self._queued[rid] = expanded
        asked = self._questions.get(rid)
        if asked is not None and pages >= asked.pages:
            self._patience.loaded(asked.waited_s)
            self._questions[rid] = replace(asked, waited_s=0.0)
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Forgets a load that has not begun. Returns whether there was one."""
        found = self._queued.pop(rid, None) is not None
        if found:
            self._release(rid)
        return found

    def start_layer_wise_loading(self) -> int:
        """Begins all queued loads. Returns the index of the batch in ``layer_done_counter``, -1 if there are none."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        pools: dict[str, tuple[list[bytes], list[Any]]] = {}
        for rid, transfers in queued.items():
            for one in transfers:
                hashes, indices = pools.setdefault(_text(one.name), ([], []))
                hashes += self._hashes(rid, tuple(one.keys))
                indices.append(one.host_indices)
        batch = self._batches.queue()
        # Work that was submitted before may still use these pages, and the forward pass has a stream of its own.
        ready = tuple(self.record_offload_ready())
        for rid in queued:
            self._questions.pop(rid, None)
        owners = tuple(map(_owner, queued))
        if not self._loads.put(Load(batch, owners, pools, ready)):
            self._batches.fail(batch, RuntimeError("kvdepot is closed"))
        return batch.number

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Waits until nothing of a batch is written to device memory any more. Returns whether all of it is there."""
        return bool(self._counter.finish(counter_index))

    # Offloads.

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:  # noqa: ARG002
        """Queues pages to be stored once everything submitted so far has written them."""
        expanded = self._group.resolve_transfers(transfers, allow_partial=True)
        if not expanded:
            return False
        pools: tuple[tuple[str, list[bytes], Any], ...] | None = ()
        events: tuple[Any, ...] = ()
        if self._writes:
            pools = self._guard.answered("offload", len(expanded[0].keys), lambda: self._to_store(expanded), None)
            events = tuple(self.record_offload_ready()) if pools else ()
        # SGLang takes the results in the order of the calls, so failures wait for their turn, too.
        until_s, again_until_s = self._room.until(), time.monotonic() + FULL_S
        return self._offloads.put(Offload(self._resets.generation, pools, events, until_s, again_until_s))

    def num_completed_offloads(self) -> int:
        """Returns the number of results that wait."""
        return len(self._results)

    def pop_completed_offload(self) -> bool:
        """Takes the oldest result: whether the pages were stored."""
        return self._results.popleft()

    # Lifecycle and metrics.

    def reset(self) -> None:
        """Forgets queued loads, leases and results, and ends all copies: SGLang reuses the pages.

        What is stored stays. If an offload does not end in time, its block may have bytes of a later page, so the
        depot is told to forget the namespace once it has ended; until then everything is a miss. If a load does not end
        in time, later pages may have its bytes, so nothing is stored until a flush that no load outlives.

        Raises:
            DepotTimeoutError: a load does not end in time, and there are other ranks. They do not know, and what they
                compute depends on this rank's pages. SGLang ends, before it gives these pages to a request.
        """
        if self._flush() and not self._alone:
            self._guard.close()
            raise DepotTimeoutError(LATE_LOAD.format(QUIET_S, self._late))

    def counts(self) -> dict[str, int]:
        """Returns counts of successes and failures by name."""
        return self._counters.snapshot()

    def close(self) -> None:
        """Ends all copies and detaches. Waits ``QUIET_S`` as a flush does, and again for each direction. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._guard.close()
        self._flush()
        self._loads.close(QUIET_S)
        self._offloads.close(QUIET_S)
        self._clearing.close()
        self._room.close()
        if not self._resets.settled:
            logger.error(UNSETTLED)
        self._counters.say()

    def _flush(self) -> int:
        """Flushes, within ``QUIET_S``. Returns how many loads still write."""
        until_s = time.monotonic() + QUIET_S
        self._queued.clear()
        self._questions.clear()
        self._room.forget()
        self._resets.flush()
        self._batches.flush()
        self._loads.drain(QUIET_S)
        if not self._offloads.drain(max(0.0, until_s - time.monotonic())):
            self._counters.trouble("late_offload", f"an offload has not ended {QUIET_S:.0f} s after a flush")
        # A copy that still runs may read pages of others from now on.
        self._resets.reuse()
        if late := self._batches.reuse():
            self._counters.trouble("late_load", LATE_LOAD.format(QUIET_S, self._late), late)
        with self._lock:
            self._results.clear()
        return late

    def _held(self, rid: str, keys: tuple[str, ...], windows: dict[str, int]) -> int:
        """Returns how many leading pages are held for a request. SGLang asks in every pass until it is admitted."""
        # A load from before a flush that does not end stops those behind it, and SGLang would wait for them forever.
        if self._batches.late or not self._clearing.settled():
            return 0
        asked = self._questions.get(rid)
        is_repeated = asked is not None and (asked.keys, asked.windows) == (keys, windows)
        if is_repeated:
            held = self._room.renew(_owner(rid))
            if held:
                return held
        # The scheduler waits, too: a request that cannot be admitted must not stop the others in every pass.
        hashes = self._hashes(rid, keys)
        began_s = time.time()  # all ranks, also on other nodes, have periods of the same time
        wait_s = self._patience.limit(began_s, is_repeated=is_repeated)
        found = self._room.hold(windows, hashes, self._room.until(), owner=_owner(rid), wait_s=wait_s) or 0
        waited_s = self._patience.waited(wait_s, began_s, time.time())
        self._counters.add("asked", len(hashes))
        self._counters.add("hit", found)
        self._forget_old()
        self._questions[rid] = Question(keys, hashes, windows, found, waited_s)
        return found

    def _hashes(self, rid: str, keys: tuple[str, ...]) -> list[bytes]:
        """Returns the hashes of pages, which are known of the first pages that the request has asked for."""
        asked = self._questions.get(rid)
        if asked is not None and asked.keys[: len(keys)] == keys:
            return asked.hashes[: len(keys)]
        return page_hashes(keys)

    def _still_held(self, rid: str, pages: int) -> bool:
        asked = self._questions.get(rid)
        if asked is None or pages > asked.pages:
            return False
        return self._room.renew(_owner(rid)) >= pages or self._held(rid, asked.keys, asked.windows) >= pages

    def _forget_old(self) -> None:
        """Forgets questions of requests that nothing is held for: SGLang does not say when it forgets a request."""
        if len(self._questions) > 2 * self._room.held() + MISSES_KEPT:
            held = self._room.owners()
            self._questions = {rid: asked for rid, asked in self._questions.items() if _owner(rid) in held}

    def _release(self, rid: str) -> None:
        self._questions.pop(rid, None)
        self._room.let_go(_owner(rid))

    def _load(self, job: Load) -> None:
        tasks: list[tuple[DevicePages, Any]] = []
        count = sum(len(hashes) for hashes, _ in job.pools.values())
        trouble = "it did not begin"
        begun = False
        try:
            for event in job.ready:
                event.synchronize()
            # Not before: a flush in the meantime has given the pages to others.
            begun = self._batches.begin(job.batch)
            trouble = self._loaded(job, tasks) if begun else "SGLang has cleared its cache"
        except BaseException as error:
            trouble = repr(error)
            if not is_failure(error):
                raise
        finally:
            for _, task in tasks:
                self._room.let_end("load", task, count)
            if begun:
                self._batches.end(job.batch)
            if trouble:
                self._counters.trouble(
                    "load_failed", f"a load failed, and SGLang aborts its requests: {trouble}", count
                )
                self._batches.fail(job.batch, BlockNotFoundError(trouble))
            else:
                self._counters.add("loaded", count)
                self._batches.complete(job.batch, self._group.num_layers - 1)
            for owner in job.owners:
                self._room.let_go(owner)

    def _loaded(self, job: Load, tasks: list[tuple[DevicePages, Any]]) -> str:
        """Loads a batch, and says of each layer but the last when it is in place. Returns why it failed, if it did."""
        for name, (hashes, indices) in job.pools.items():
            task = self._room.begin_load(name, hashes, self._places(name, indices))
            if task is None:
                return f"no load of {len(hashes)} pages of pool {name} began"
            tasks.append((self._pages[name], task))
        for layer in range(self._group.num_layers - 1):
            for pages, task in tasks:
                shard = pages.shard_of(layer)
                if shard is not None:
                    task.wait_shard(shard)  # for a page that failed as well
            self._batches.complete(job.batch, layer)
        failures = [task.result().failures for _, task in tasks if task.wait_done()]
        return ", ".join(f"{count} pages: {kind}" for kinds in failures for kind, count in kinds.items())

    def _to_store(self, transfers: Sequence[Any]) -> tuple[tuple[str, list[bytes], Any], ...] | None:
        """Returns hashes and device indices of each pool; ``None`` if too much waits already."""
        if self._offloads.waiting >= OFFLOADS_MAX:
            self._counters.trouble("offloads_full", f"{OFFLOADS_MAX} offloads wait already", len(transfers[0].keys))
            return None
        return tuple((_text(one.name), page_hashes(one.keys), one.host_indices) for one in transfers)

    def _offload(self, job: Offload) -> None:
        stored = False
        try:
            stored = self._stored(job)
        except BaseException as error:
            self._counters.trouble("offload_error", f"an offload failed: {error!r}")
            if not is_failure(error):
                raise
        finally:
            with self._lock:
                # Results of before a reset are not asked for any more.
                if job.generation == self._resets.generation:
                    self._results.append(stored)

    def _stored(self, job: Offload) -> bool:
        if job.pools is None or self._batches.doubtful or not self._clearing.settled():
            return False
        for event in job.events:
            event.synchronize()
        # Not before: a flush in the meantime has given the pages to others.
        if not self._resets.begin(job.generation):
            return False
        try:
            moved = [
                self._room.move(
                    "dump", name, hashes, self._places(name, [indices]), job.until_s, again_until_s=job.again_until_s
                )
                for name, hashes, indices in job.pools
            ]
        finally:
            if not self._resets.end(job.generation):
                self._clearing.settled()  # a reset is due
        return all(all(pages) for pages in moved)

    def _places(self, name: str, indices: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
        rows = [row for one in indices for row in self._entries(name).prepare_locations(one)]
        return self._pages[name].places(rows)

    def _entries(self, name: str) -> Any:
        return next(entry for key, entry in self.pools.items() if _text(key) == name)


def wait_s(config: KVDepotConfig) -> float:
    """Returns how many seconds a lookup waits for pages from a tier: SGLang's scheduler does nothing else meanwhile."""
    limits_ms = {"best_effort": 0, "deadline": config.load_deadline_ms, "all": config.timeout_ms}
    limit_ms = limits_ms.get(config.load_policy)
    return CLAIM_S if limit_ms is None else limit_ms / 1e3


def _owner(rid: str) -> bytes:
    return rid.encode()


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))
