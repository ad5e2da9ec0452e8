"""kvdepot as a storage backend of SGLang's HiCache (``--hicache-storage-backend dynamic``), 0.5.8 to 0.5.23.

SGLang looks pages up and moves them page by page, on one thread per direction, and treats every failure as a miss.
After the start, kvdepot raises nothing into SGLang: it counts each failure by kind, and reports a miss.
"""

import importlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from sglang.srt.mem_cache import hicache_storage

from kvdepot.engines.clearing import UNSETTLED, Clearing
from kvdepot.engines.resets import Resets
from kvdepot.engines.sglang import engine
from kvdepot.engines.sglang.facts import engine_facts, pool_facts, refuse_pool, refuse_unsupported
from kvdepot.engines.sglang.guard import Guard
from kvdepot.engines.sglang.hits import ALL_PAGES, KV, TRAILING_PAGES, common, leading, restorable
from kvdepot.engines.sglang.keys import page_hashes
from kvdepot.engines.sglang.options import read_extra_config
from kvdepot.engines.sglang.pages import KNOWN, Pages
from kvdepot.engines.sglang.report import report_for
from kvdepot.engines.sglang.room import Room, Verb

CLAIM_PAGES = 128
"""Number of pages that SGLang reads in one call: leases of read pages are dropped before it reads more."""
RATES_MAX = 1024
"""Maximum number of batches whose pages and rates are kept until SGLang's metrics collect them."""
REMEDY = "detach the storage backend and attach it again"
"""What to do after an update of the weights in place."""

logger = logging.getLogger("sglang.kvdepot")


class KVDepotHiCache(hicache_storage.HiCacheStorage):
    """Stores pages of SGLang's host pools as blocks of the node's depot."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:  # noqa: ARG002
        """Attaches to the depot.

        Args:
            storage_config: SGLang's ``HiCacheStorageConfig``; ``extra_config`` has our keys.
            kwargs: SGLang's arguments for any backend; unused.

        Raises:
            ConfigError: a key is wrong, or this model's KV cannot be distinguished from another's.
        """
        self._storage = storage_config
        options = read_extra_config(storage_config.extra_config)
        refuse_unsupported(storage_config)
        self._facts = engine_facts(options)
        self._counters = report_for(engine.server_arguments())
        self._guard = Guard(self._counters, REMEDY)
        self._resets = Resets()
        self._lock = threading.Lock()
        self._pages: dict[str, Pages] = {}
        self._empty: set[str] = set()
        self._rates: dict[Verb, list[tuple[int, float]]] = {"load": [], "dump": []}
        ranks = engine.ranks_of_node(engine.server_arguments(), storage_config)
        self._room = Room(options.config, self._counters, ranks=ranks)
        self._clearing = Clearing(self._resets, self._room.reset)
        if not engine.hashes_know_adapters() and not options.salt:
            logger.warning(
                "kvdepot: SGLang %s leaves a request's cache_salt out of its page hashes: tenants share pages, unless "
                "each has an engine of its own with another salt in the extra config",
                engine.sglang_version(),
            )

    # Pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Registers the main KV pool.

        Raises:
            ConfigError: it does not report where its pages lie, or a page does not fit a block.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Registers another pool, or the main one again. Raises the same errors as ``register_mem_pool_host``."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(_name(host_pool_name), host_pool)

    # Lookups.

    def exists(self, key: str) -> bool:
        """Returns whether the depot has a page."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ARG002
        """Returns how many leading pages the depot has. It brings them into its pool, and holds them until read."""
        return self._guard.answered("lookup", len(keys), lambda: self._prefix(page_hashes(keys)), 0)

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:  # noqa: ARG002
        """Returns the prefix lengths that all pools can restore. The longest one is held."""
        empty = _result(0, {}, [])
        wanted = pool_transfers or ()
        return self._guard.answered("lookup", len(keys), lambda: self._common(page_hashes(keys), wanted), empty)

    # Reads and writes.

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Loads pages into the main KV pool. Returns for each page whether it was loaded."""
        return self._moved("load", KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Stores pages of the main KV pool. Returns for each page whether it was stored."""
        return self._moved("dump", KV, keys, host_indices)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:  # noqa: ARG002
        """Loads pages of several pools. Returns for each page of each pool whether it was loaded."""
        until_s = self._room.until()
        return {
            one.name: self._moved("load", _name(one.name), one.keys, one.host_indices, until_s) for one in transfers
        }

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:  # noqa: ARG002
        """Stores pages of several pools. Returns for each page of each pool whether it was stored."""
        until_s = self._room.until()
        return {
            one.name: self._moved("dump", _name(one.name), one.keys, one.host_indices, until_s) for one in transfers
        }

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:  # noqa: ARG002
        """Loads a page into a tensor of its bytes. Returns the tensor, or ``None`` for a miss."""
        return target_location if self._flat("load", key, target_location) else None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:  # noqa: ARG002
        """Loads pages into tensors. Returns the tensors, with ``None`` for each miss."""
        until_s = self._room.until()
        pairs = zip(keys, target_locations or (), strict=False)
        return [target if self._flat("load", key, target, until_s) else None for key, target in pairs]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:  # noqa: ARG002
        """Stores a page from a tensor of its bytes. Returns whether it was stored."""
        return self._flat("dump", key, value if value is not None else target_location)

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Stores pages. Returns whether all were stored."""
        tensors = values if values is not None else target_locations or ()
        until_s = self._room.until()
        return len(tensors) == len(keys) and all(
            self._flat("dump", key, tensor, until_s) for key, tensor in zip(keys, tensors, strict=True)
        )

    # Lifecycle and metrics.

    def clear(self) -> bool:
        """Makes all pages of this model and rank unreachable, for every engine and in every tier.

        Until the depot has confirmed that, everything is a miss here. Waits at most ``CLEAR_S`` for it: SGLang calls
        this on its scheduler's thread. Pages that SGLang has queued but not handed over yet are stored afterwards.

        Returns:
            Whether the depot has confirmed it; if not, it is asked again in the background.
        """
        if self._guard.closed:
            return False
        self._resets.clear()
        return self._clearing.confirmed()

    def get_stats(self) -> Any:
        """Returns pages and rates of the batches since the last call for SGLang's metrics; ``None`` without those."""
        with self._lock:
            rates = self._rates
            self._rates = {"load": [], "dump": []}
        try:
            made = importlib.import_module("sglang.srt.observability.metrics_collector").StorageMetrics()
        except (ImportError, AttributeError):
            return None
        made.prefetch_pgs.extend(pages for pages, _ in rates["load"])
        made.prefetch_bandwidth.extend(rate for _, rate in rates["load"])
        made.backup_pgs.extend(pages for pages, _ in rates["dump"])
        made.backup_bandwidth.extend(rate for _, rate in rates["dump"])
        return made

    def counts(self) -> dict[str, int]:
        """Returns counts of successes and failures by name."""
        return self._counters.snapshot()

    def close(self) -> None:
        """Waits for running calls, at most ``CALL_S``, and detaches. Idempotent."""
        if self._guard.closed:
            return
        self._guard.close()
        self._clearing.close()
        self._room.close()
        if not self._resets.settled:
            logger.error(UNSETTLED)
        self._counters.say()

    def _register(self, name: str, pool: Any) -> None:
        known = self._pages.get(name)
        if known is not None and known.pool is pool:
            return
        refuse_pool(name, pool, self._storage)
        pages = Pages.of(pool, name)
        if pages is None:
            self._empty.add(name)
            return
        self._room.open(name, pages, pool_facts(self._facts, name, pages, self._storage))
        self._pages[name] = pages

    def _prefix(self, hashes: list[bytes]) -> int:
        if not self._clearing.settled() or KV in self._empty:
            return 0
        until_s = self._room.until()
        found = self._room.lookup_on_prefix(KV, hashes, until_s)
        held = 0
        while held < found:
            asked = hashes[held : min(found, held + CLAIM_PAGES)]
            units = self._room.hold({KV: 0}, asked, until_s)
            if units != len(asked):
                # A page that is not held is usually still found: a get that finds fewer returns the leading ones.
                held += units or 0
                found = held + self._room.lookup_on_prefix(KV, hashes[held:found], until_s)
                break
            held += units
        self._count_question(len(hashes), found)
        return found

    def _common(self, hashes: list[bytes], transfers: Sequence[Any]) -> Any:
        if not self._clearing.settled():
            return _result(0, {}, [])
        until_s = self._room.until()
        pages = len(hashes)
        if KV not in self._empty:
            pages = leading(self._room.lookup(KV, hashes, until_s))
        verdicts = [np.ones(pages + 1, dtype=bool)]
        hits: dict[Any, int] = {KV: pages} if pages else {}
        windows = {} if KV in self._empty else {KV: 0}
        for one in transfers:
            name, policy = _name(one.name), _text(one.hit_policy)
            if name in self._empty or policy not in (ALL_PAGES, TRAILING_PAGES):
                continue
            window = 0 if policy == ALL_PAGES else max(1, len(one.keys or ()))
            verdict = restorable(self._room.lookup(name, hashes[:pages], until_s), pages, policy, window)
            verdicts.append(verdict)
            hits[one.name] = int(np.flatnonzero(verdict).max(initial=0))
            windows[name] = window
        lengths = common(verdicts) if windows else []
        if lengths:
            # Report only what is held: a pool beside the KV must not come back shorter than it.
            held = self._room.hold(windows, hashes[: lengths[-1]], until_s) or 0
            lengths = [length for length in lengths if length <= held]
        longest = lengths[-1] if lengths else 0
        self._count_question(len(hashes), longest)
        return _result(longest, hits, lengths)

    def _count_question(self, asked: int, found: int) -> None:
        self._counters.add("asked", asked)
        self._counters.add("hit", found)

    def _moved(
        self, verb: Verb, name: str, keys: Sequence[str] | None, host_indices: Any, until_s: float | None = None
    ) -> list[bool]:
        count = len(keys or ())
        if name in self._empty:
            return [True] * count
        missed = [False] * count
        if not count:
            return missed

        def move() -> list[bool]:
            pages = self._pages.get(name)
            hashes = page_hashes(keys or ())
            if pages is None or host_indices is None:
                self._counters.trouble("unknown_pool", f"pool {name} is not open, or no indices were given", count)
                return missed
            return self._move(verb, name, hashes, pages.addresses(host_indices, count), until_s)

        return self._guard.answered(verb, count, move, missed)

    def _move(self, verb: Verb, name: str, hashes: list[bytes], addresses: Any, until_s: float | None) -> list[bool]:
        missed = [False] * len(hashes)
        generation = self._resets.generation
        if not self._clearing.settled() or (verb == "dump" and not self._resets.begin(generation)):
            return missed
        began_s = time.monotonic()
        current = False
        try:
            ended = self._room.move(verb, name, hashes, addresses, until_s)
        finally:
            current = self._resets.end(generation) if verb == "dump" else generation == self._resets.generation
            if verb == "load":
                self._room.read(name, hashes)
            if not current:
                self._clearing.settled()  # a reset is due
        pages = self._pages.get(name)
        self._rate(verb, sum(ended), pages.size_bytes if pages else 0, time.monotonic() - began_s)
        return ended if current else missed

    def _flat(self, verb: Verb, key: str, tensor: Any, until_s: float | None = None) -> bool:
        """Moves a page between the depot and a tensor that contains its pieces in order."""

        def move() -> bool:
            pages = self._pages.get(KV)
            if pages is None or tensor is None or type(pages.pool).__name__ not in KNOWN:
                self._counters.trouble("no_flat_page", "a page was asked for that is no plain tensor")
                return False
            size = int(tensor.numel() * tensor.element_size())
            if size != pages.size_bytes or not tensor.is_contiguous():
                self._counters.trouble("no_flat_page", f"a tensor has {size} bytes, and a page {pages.size_bytes}")
                return False
            begins = np.concatenate(([0], np.cumsum(pages.sizes)[:-1])).astype(np.uint64)
            addresses = (begins + np.uint64(tensor.data_ptr())).reshape(1, -1)
            return self._move(verb, KV, page_hashes([key]), addresses, until_s)[0]

        return self._guard.answered(verb, 1, move, missed=False)

    def _rate(self, verb: Verb, pages: int, page_bytes: int, seconds: float) -> None:
        with self._lock:
            if pages and len(self._rates[verb]) < RATES_MAX:
                self._rates[verb].append((pages, pages * page_bytes / 1e9 / max(seconds, 1e-9)))


def _name(pool: Any) -> str:
    return _text(pool)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def _result(longest: int, hits: dict[Any, int], lengths: list[int]) -> Any:
    """Returns SGLang's result; releases before 0.5.19 have no set of lengths."""
    made = hicache_storage.PoolTransferResult(kv_hit_pages=longest, extra_pool_hit_pages=hits)
    if hasattr(made, "restorable_prefix_pages"):
        made.restorable_prefix_pages = lengths
    return made
