"""kvdepot as a storage plug-in of LMCache inside the engine: ``storage_plugins``."""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from kvdepot.engines.clearing import UNSETTLED, Clearing
from kvdepot.engines.lmcache.bounded import Bounded
from kvdepot.engines.lmcache.counters import Counters, lmcache_logger
from kvdepot.engines.lmcache.facts import (
    Layout,
    UnknownLayoutError,
    dtype_name,
    lmcache_version,
    namespace_facts,
    refuse_untold,
)
from kvdepot.engines.lmcache.keys import chunk_hash
from kvdepot.engines.lmcache.objects import address_of, layout_of
from kvdepot.engines.lmcache.options import read_extra_config
from kvdepot.engines.lmcache.recent import Recent
from kvdepot.engines.lmcache.stores import Place, Stores
from kvdepot.engines.lmcache.weights import Weights
from kvdepot.engines.resets import Resets
from kvdepot.errors import ConfigError, is_failure

FACE = "engine"
PUT_THREADS = 2
GET_THREADS = 2
LOOKUP_THREADS = 2
PUTS_MAX = 4096
"""Maximum number of objects being stored: each holds memory of LMCache's."""
ALLOCATE_S = 1.0
"""Seconds that a load waits for memory of LMCache's that stores in flight still hold."""
ALLOCATE_AGAIN_S = 0.01


class KVDepotBackend(StoragePluginInterface):
    """Stores LMCache's chunks in the node's depot, which is started if none answers.

    Stores run in the background. A load waits for its chunks, at most ``timeout_ms``. A chunk that LMCache removes is a
    miss in this process until it is stored again; ``clear`` makes the chunks of this model unreachable for all engines.

    Thread safety: any number of threads may call it concurrently.
    """

    def __init__(
        self,
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: Any = None,
        dst_device: str = "cpu",
    ) -> None:
        """Reads the configuration, and begins to attach to a depot in the background.

        Args:
            config: LMCache's configuration; ``extra_config`` has ours.
            metadata: model, ranks and shapes.
            local_cpu_backend: allocates the memory of loads; a scheduler, which only looks up, has none.
            loop: LMCache's event loop.
            dst_device: device of the engine's KV.

        Raises:
            ConfigError: a key or value is wrong, or LMCache's configuration asks for something unsupported.
        """
        super().__init__(
            dst_device=dst_device, config=config, metadata=metadata, local_cpu_backend=local_cpu_backend, loop=loop
        )
        if config is None or metadata is None or not metadata.model_name:
            raise ConfigError("kvdepot needs LMCache's config and metadata, with the model's name")
        if config.use_layerwise:
            raise ConfigError("use_layerwise: kvdepot stores whole chunks: set it to false")
        if config.save_unfull_chunk:
            lmcache_logger().warning("kvdepot: save_unfull_chunk: the depot stores full chunks only")
        if not os.environ.get("PYTHONHASHSEED"):
            lmcache_logger().warning(
                "kvdepot: other processes will not find these chunks: LMCache's hashes are random: set PYTHONHASHSEED"
            )
        self._options = read_extra_config(config.extra_config)
        lmcache_version()
        refuse_untold([dtype_name(metadata.kv_dtype)], self._options.weights_version)
        self._counters = Counters()
        self._weights = Weights(self._options.weights_version, self._options.config.attach_timeout_ms / 1000)
        self._stores = Stores(self._options.config, self._facts, self._counters)
        self._removed = Recent()
        self._puts: set[Any] = set()
        self._kept: list[Any] = []
        self._lock = threading.Lock()
        self._put_threads = ThreadPoolExecutor(PUT_THREADS, thread_name_prefix="kvdepot-put")
        self._loads = Bounded("load", GET_THREADS, self._counters)
        self._lookups = Bounded("lookup", LOOKUP_THREADS, self._counters)
        self._resets = Resets()
        self._clearing = Clearing(self._resets, self._reset)
        self._closed = False
        # A depot that has to be started first is then ready for the first request, even in a scheduler, which only
        # looks up.
        self._loads.submit(self._open)

    def __str__(self) -> str:
        return type(self).__name__

    def contains(self, key: Any, pin: bool = False) -> bool:
        """Returns whether the depot has a chunk. ``pin`` prefetches it into the pool, but holds nothing."""
        return self.batched_contains([key], pin) == 1

    def batched_contains(self, keys: list[Any], pin: bool = False) -> int:
        """Returns how many leading chunks the depot has."""
        try:
            rows = self._rows(keys)
            found = self._stores.lookup(rows)
            hits = found.index(False) if False in found else len(found)
            if pin and hits:
                self._stores.prefetch(rows[:hits])
        except BaseException as error:  # nothing is raised into LMCache: it is a miss
            if not is_failure(error):
                raise
            self._counters.trouble("lookup_error", f"a lookup failed: {error!r}", len(keys))
            return 0
        self._counters.add("looked_up", len(keys))
        self._counters.add("found", hits)
        return hits

    async def batched_async_contains(self, lookup_id: str, keys: list[Any], pin: bool = False) -> int:  # noqa: ARG002
        """The same as ``batched_contains``, without blocking the event loop."""
        return int(await self._lookups.run(functools.partial(self.batched_contains, keys, pin), 0))

    def exists_in_put_tasks(self, key: Any) -> bool:
        """Returns whether a chunk is being stored."""
        with self._lock:
            return key in self._puts

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,  # noqa: ARG002
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> list[Future[None]] | None:
        """Starts storing chunks, and holds their memory until then. Calls back for each stored chunk."""
        chosen: list[tuple[Any, Any]] = []
        with self._lock:
            room = 0 if self._closed else PUTS_MAX - len(self._puts)
            excess = 0
            for key, obj in zip(keys, objs, strict=False):
                if key in self._puts:
                    continue
                if len(chosen) < room:
                    self._puts.add(key)
                    chosen.append((key, obj))
                else:
                    excess += 1
            if chosen:
                removed = self._removed.marks(name for key, _ in chosen if (name := self._name(key)) is not None)
                generation = self._resets.generation
                for _, obj in chosen:
                    obj.ref_count_up()
                try:
                    future = self._put_threads.submit(self._put, chosen, removed, generation, on_complete_callback)
                except RuntimeError:  # the interpreter is shutting down
                    self._puts.difference_update(key for key, _ in chosen)
                    for _, obj in chosen:
                        obj.ref_count_down()
                    return None
        self._counters.trouble("put_not_begun", "chunks were not stored: too many wait, or closed", excess)
        return [future] if chosen else None

    async def async_batched_submit_put_task(
        self,
        keys: Sequence[Any],
        objs: list[Any],
        transfer_spec: Any = None,
        on_complete_callback: Callable[[Any], None] | None = None,
    ) -> None:
        """The same as ``batched_submit_put_task``."""
        self.batched_submit_put_task(keys, objs, transfer_spec, on_complete_callback)

    def get_blocking(self, key: Any) -> Any:
        """Returns a chunk, in memory that the caller releases; ``None`` for a miss."""
        return self.batched_get_blocking([key])[0]

    def batched_get_blocking(self, keys: list[Any]) -> list[Any]:
        """Returns chunks in the order of their keys, in memory that the caller releases; ``None`` for each miss."""
        try:
            return self._get(keys)
        except BaseException as error:  # nothing is raised into LMCache: it is a miss
            if not is_failure(error):
                raise
            self._counters.trouble("load_error", f"a load failed: {error!r}", len(keys))
            return [None] * len(keys)

    async def batched_get_non_blocking(
        self,
        lookup_id: str,  # noqa: ARG002
        keys: list[Any],
        transfer_spec: Any = None,  # noqa: ARG002
    ) -> list[Any]:
        """Returns the leading chunks that were loaded, in memory that the caller releases."""
        found = await self._loads.run(functools.partial(self.batched_get_blocking, keys), [])
        leading = found.index(None) if None in found else len(found)
        for memory in found[leading:]:
            if memory is not None:
                memory.ref_count_down()
        return found[:leading]

    def pin(self, key: Any) -> bool:
        """Prefetches a chunk into the pool, but holds nothing. Returns whether the depot has it."""
        return self.contains(key, pin=True)

    def unpin(self, key: Any) -> bool:  # noqa: ARG002
        """Does nothing: no chunk is held."""
        return True

    def remove(self, key: Any, force: bool = True) -> bool:  # noqa: ARG002
        """Makes a chunk a miss in this process until it is stored again. Returns whether it was present before."""
        was_there = self.contains(key)
        try:
            self._removed.mark(chunk_hash(key))
        except UnknownLayoutError as error:
            self._counters.trouble("unknown_key", str(error))
        self._counters.add("removed", was_there)
        return was_there

    def clear(self) -> int:
        """Makes all chunks of this model and layout unreachable, for every engine and rank, in every tier.

        Until the depot has confirmed this, everything is a miss here. Waits at most ``CLEAR_S`` for it, and retries in
        the background. Queued chunks are not stored. Chunks in flight become unreachable, too, once their stores have
        ended.

        Returns:
            0: the removed chunks are not counted.
        """
        self._resets.clear()
        self._clearing.confirmed()
        return 0

    def touch_cache(self) -> None:
        """Does nothing: lookups and loads tell the depot which chunks are used."""

    def get_allocator_backend(self) -> Any:
        """Returns the allocator of the chunks' memory.

        Raises:
            RuntimeError: a scheduler has none.
        """
        if self.local_cpu_backend is None:
            raise RuntimeError("kvdepot: LMCache has no CPU memory here: set max_local_cpu_size")
        return self.local_cpu_backend

    def counts(self) -> dict[str, int]:
        """Returns counts of successes and failures by name."""
        return self._counters.snapshot()

    def close(self) -> None:
        """Waits for stores and loads in flight, at most ``timeout_ms``, and detaches. Idempotent.

        Queued stores are dropped, queued loads are misses.
        """
        with self._lock:
            self._closed = True
        self._put_threads.shutdown(wait=True)
        self._loads.close()
        self._lookups.close()
        self._clearing.close()
        self._stores.close()
        if not self._resets.settled:
            lmcache_logger().error(UNSETTLED)

    def _facts(self, layout: Layout) -> Mapping[str, object]:
        config, metadata = self.config, self.metadata
        further = {
            "kv_shape": [int(size) for size in metadata.kv_shape],
            "chunk_tokens": int(config.chunk_size),
            "latent_attention": bool(metadata.use_mla),
            "hash": str(config.pre_caching_hash_algorithm),
            **self._weights.facts(layout.model),
        }
        return namespace_facts(layout, FACE, self._options.weights_version, further)

    def _layout(self) -> Layout:
        """Returns the layout of a full chunk; not cached, as LMCache learns the shapes after creating its backends."""
        metadata = self.metadata
        form = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD
        shapes = metadata.get_shapes(self.config.chunk_size)
        return Layout.of(metadata.model_name, shapes, metadata.get_dtypes(), form.name)

    def _open(self) -> None:
        if self._closed:
            return
        try:
            self._stores.open(self._layout())
        except BaseException as error:  # the first lookup tries again
            if not is_failure(error):
                raise
            self._counters.trouble("open_error", f"no store was opened: {error!r}")

    def _rows(self, keys: Sequence[Any]) -> list[tuple[Layout, bytes]]:
        """Returns layout and hash of the leading keys that may be present."""
        if self._closed or not self._clearing.settled():
            return []
        rows: list[tuple[Layout, bytes]] = []
        try:
            layout = self._layout()
            for key in keys:
                name = chunk_hash(key)
                if name in self._removed:
                    break
                rows.append((layout, name))
        except UnknownLayoutError as error:
            self._counters.trouble("unknown_key", str(error), len(keys) - len(rows))
        return rows

    def _name(self, key: Any) -> bytes | None:
        with contextlib.suppress(UnknownLayoutError):  # reported when it is stored
            return chunk_hash(key)
        return None

    def _put(
        self,
        chosen: list[tuple[Any, Any]],
        removed: Mapping[bytes, int],
        generation: int,
        on_complete: Callable[[Any], None] | None,
    ) -> None:
        stored: list[Any] = []
        try:
            stored = self._dump(chosen, removed, generation)
        except BaseException as error:  # nothing is raised into LMCache
            if not is_failure(error):
                raise
            self._counters.trouble("dump_error", f"chunks were not stored: {error!r}", len(chosen))
        finally:
            with self._lock:
                self._puts.difference_update(key for key, _ in chosen)
            for _, obj in chosen:
                obj.ref_count_down()
        if on_complete is not None:
            for key in stored:
                self._call_back(on_complete, key)

    def _call_back(self, on_complete: Callable[[Any], None], key: Any) -> None:
        try:
            on_complete(key)
        except BaseException as error:  # the caller's own failure
            if not is_failure(error):
                raise
            self._counters.trouble("callback_error", f"LMCache's callback failed: {error!r}")

    def _dump(self, chosen: list[tuple[Any, Any]], removed: Mapping[bytes, int], generation: int) -> list[Any]:
        if self._closed:
            self._counters.trouble("put_not_begun", "chunks were not stored: closed", len(chosen))
            return []
        if not self._clearing.settled() or not self._resets.begin(generation):
            self._counters.add("not_stored_before_reset", len(chosen))
            return []
        try:
            stored = self._dump_begun(chosen, removed)
        finally:
            in_time = self._resets.end(generation)
        if not in_time:
            # The depot may have stored these chunks after its reset, which is repeated until it works.
            self._counters.add("reset_again")
            self._clearing.settled()
        return stored if in_time else []

    def _dump_begun(self, chosen: list[tuple[Any, Any]], removed: Mapping[bytes, int]) -> list[Any]:
        layout = self._layout()
        places: list[Place] = []
        keys, objects = [], []
        for key, obj in chosen:
            place = self._place(key, obj, layout)
            if place is not None:
                places.append(place)
                keys.append(key)
                objects.append(obj)
        moved = self._stores.move("dump", places)
        ended = moved.done
        for obj, copying in zip(objects, moved.copying, strict=True):
            if copying:
                self._keep(obj)
        for (_, name, _), well in zip(places, ended, strict=True):
            if well and name in removed:
                # Unless it was removed again while it was being stored.
                self._removed.take(name, only=removed[name])
        return [key for key, well in zip(keys, ended, strict=True) if well]

    def _place(self, key: Any, obj: Any, layout: Layout) -> Place | None:
        """Returns layout, hash and address of a chunk to store; ``None`` if it is not a full chunk of this model."""
        try:
            found = layout_of(obj, layout.model, obj.get_memory_format().name)
            if found == layout:
                return layout, chunk_hash(key), address_of(obj, layout)
            self._counters.trouble(
                "other_layout", f"a chunk is not stored: its layout is {found}, that of full chunks is {layout}"
            )
        except UnknownLayoutError as error:
            self._counters.trouble("unknown_object", str(error))
        return None

    def _get(self, keys: Sequence[Any]) -> list[Any]:
        found: list[Any] = [None] * len(keys)
        if self.local_cpu_backend is None or self._closed or not self._clearing.settled():
            return found
        generation = self._resets.generation
        layout = self._layout()
        names = {number: chunk_hash(key) for number, key in enumerate(keys)}
        wanted = [number for number, name in names.items() if name not in self._removed]
        memories = self._allocate(len(wanted))
        self._counters.trouble("no_memory", "LMCache has no memory for loads", len(wanted) - len(memories))
        places: list[Place] = []
        try:
            for number, memory in zip(wanted, memories, strict=False):
                places.append((layout, names[number], address_of(memory, layout)))
        except BaseException:
            for memory in memories:
                memory.ref_count_down()
            raise
        try:
            moved = self._stores.move("load", places)
        except BaseException:  # this process is asked to exit, and may still copy
            self._kept += memories
            raise
        # A clear in the meantime makes everything a miss.
        current = generation == self._resets.generation
        for index, memory in enumerate(memories):
            if current and moved.done[index] and places[index][1] not in self._removed:
                found[wanted[index]] = memory
            else:
                if moved.copying[index]:
                    self._keep(memory)
                memory.ref_count_down()
        return found

    def _keep(self, obj: Any) -> None:
        """Keeps memory for as long as this process lives. LMCache also takes back an object that nobody refers to."""
        obj.ref_count_up()
        self._kept.append(obj)

    def _allocate(self, count: int) -> list[Any]:
        """Allocates memory for up to ``count`` chunks."""
        if count == 0:
            return []
        cpu, metadata = self.local_cpu_backend, self.metadata
        shapes, dtypes = metadata.get_shapes(self.config.chunk_size), metadata.get_dtypes()
        form = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD
        # LMCache's batched eviction mistakes the count for a number of layers, so a batch gets free memory only.
        memories = list(cpu.batched_allocate(shapes, dtypes, count, form, eviction=False) or [])
        end_s = time.monotonic() + ALLOCATE_S
        while len(memories) < count:
            try:
                memory = cpu.allocate(shapes, dtypes, form, eviction=True, busy_loop=False)
            except BaseException as error:  # what was allocated before would be lost with it
                if not is_failure(error):
                    raise
                self._counters.trouble("allocate_error", f"LMCache did not allocate memory: {error!r}")
                break
            if memory is not None:
                memories.append(memory)
            elif time.monotonic() > end_s:
                break
            else:
                time.sleep(ALLOCATE_AGAIN_S)
        return memories

    def _reset(self) -> bool:
        """Makes the model's chunks unreachable. Returns whether the depot has confirmed that."""
        try:
            return self._stores.reset(self._layout())
        except BaseException as error:  # sent again
            if not is_failure(error):
                raise
            self._counters.trouble("reset_error", f"nothing was cleared: {error!r}")
            return False
