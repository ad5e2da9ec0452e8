"""Blocks of one namespace: the ``Store`` that ``kvdepot.open`` and ``Depot.open`` return."""

import json
import os
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from kvdepot import _native
from kvdepot.config import KVDepotConfig
from kvdepot.errors import ConfigError, UnavailableError
from kvdepot.layout import BlockLayout
from kvdepot.memory import Addresses, Buffers, after_torch, memory_of
from kvdepot.namespace import Namespace
from kvdepot.priority import Priority
from kvdepot.task import Task, TaskResult

_CLOSE_GRACE_MS = 1_000
"""Milliseconds that ``close`` waits beyond a task's time limit: on a device that hangs, a load may never finish."""


class Store:
    """Dumps and loads the blocks of one namespace. Created by ``kvdepot.open`` or ``Depot.open``.

    Blocks are named by the engine's hashes, ``bytes`` of length 1 to 64. Calls that move bytes return a ``Task``
    immediately. For lookups, dumps and loads a failure of the depot is a miss, never an exception (P2): ``lookup``
    finds nothing, a task's blocks fail. After ``close``, calls that need the depot raise ``UnavailableError``.

    Thread safety: any number of threads may use one store concurrently, including ``close``. Calls release the
    interpreter lock before they wait or copy.

    Processes: a store belongs to the process that opened it. In a forked child, calls raise ``UnavailableError``, and
    ``close`` does nothing; open another store there.
    """

    def __init__(
        self,
        config: KVDepotConfig,
        namespace: Namespace,
        depot: _native.Depot,
        native: _native.Store,
        *,
        cuda_device: int | None = None,
        timeout_ms: int | None = None,
        owns_namespace: bool = True,
    ) -> None:
        self._config = config
        self._namespace = namespace
        self._cuda_device = cuda_device
        self._layout = namespace.layout
        self._depot = depot
        self._native = native
        self._timeout_ms = config.timeout_ms if timeout_ms is None else timeout_ms
        self._owns_namespace = owns_namespace
        self.owns_attachment = False
        """Whether ``close`` detaches from the depot, too."""
        self.closed = False
        """Whether ``close`` has returned."""
        self._closed = False
        self._pid = os.getpid()

    @property
    def namespace(self) -> Namespace:
        """The namespace of its blocks."""
        return self._namespace

    @property
    def native_namespace(self) -> _native.Namespace:
        """The core's namespace, for kvdepot itself.

        Raises:
            UnavailableError: the store is closed.
        """
        self._check_open()
        return self._namespace.native

    @property
    def config(self) -> KVDepotConfig:
        """Configuration that the store was opened with."""
        return self._config

    @property
    def layout(self) -> BlockLayout:
        """How a block is cut into shards and tensors."""
        return self._layout

    @property
    def namespace_id(self) -> str:
        """Name of the namespace, and of its directory in a Posix tier: 32 hex digits, the same through all resets."""
        return self._namespace.id

    @property
    def attached(self) -> bool:
        """Whether calls currently reach a depot."""
        return not self._closed and self._depot.attached

    def lookup(self, hashes: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Returns for each block whether the depot has it, in its pool or a tier: shape ``(len(hashes),)``."""
        return self._native.lookup(hashes)

    def lookup_on_prefix(self, hashes: Sequence[bytes]) -> int:
        """Returns how many leading blocks the depot has, in its pool or a tier."""
        return self._native.lookup_on_prefix(hashes)

    def prefetch(self, hashes: Sequence[bytes]) -> None:
        """Asks the depot to bring blocks from the tiers into the pool. Returns immediately."""
        self._native.prefetch(hashes)

    def dump(
        self,
        hashes: Sequence[bytes],
        buffers: Buffers,
        shards: Sequence[int] | None = None,
        *,
        wait_event: int = 0,
        priority: Priority = "normal",
        keep: object = None,
    ) -> Task:
        """Stores blocks.

        Args:
            hashes: hash of the block of each row.
            buffers: one row of tensors for each hash: torch tensors (or numpy arrays in host memory), contiguous, with
                the layout's sizes, without Python objects. The store keeps a reference to each until no copy touches it
                any more, whatever happens to ``buffers`` and the task. Or the tensors' addresses as a ``uint64`` array
                of shape ``(rows, tensors)``, whose memory the caller keeps allocated until the task is done.
            shards: shard of each row, which then has the tensors of that shard. ``None`` = whole blocks: a row has the
                tensors of all shards in order.
            wait_event: CUDA event after which the memory may be used, as for ``dump_pages``. 0 = now for addresses; for
                tensors, after everything launched so far on torch's current stream of the device. Other streams are not
                waited for.
            priority: how long the blocks stay in the pool, compared with others. ``low``: they are evicted before all
                others, and written to no tier, until their first use. ``high``: they are evicted after all others,
                while such blocks take at most half of the pool. A block that is stored twice keeps the higher one.
                Tiers do not know priorities, and a pool that keeps no blocks (``Staging``) has none.
            keep: object that is held until no copy touches the memory any more, such as the owner of addresses.

        Returns:
            The task. The memory must not change before it is done. ``lookup`` finds a block once all its shards were
            stored, by one task or several. If earlier shards of a block are lost, with the depot or because the next
            one did not come within ``timeout_ms``, later ones fail: dump all of its shards again.

        Raises:
            ConfigError: sizes or counts do not fit the layout, its shards have different numbers of tensors, a hash is
                not 1 to 64 bytes long, an array holds Python objects, or no priority has this name. Nothing was stored.
            UnsupportedError: a tensor is not in the memory that the store was opened for.
        """
        dump = partial(self._native.dump, priority=priority)
        return self._submit(dump, hashes, buffers, shards, wait_event, keep, writable=False)

    def load(
        self,
        hashes: Sequence[bytes],
        buffers: Buffers,
        shards: Sequence[int] | None = None,
        *,
        wait_event: int = 0,
        keep: object = None,
    ) -> Task:
        """Loads blocks into ``buffers``. Arguments, result and errors as for ``dump``.

        The bytes of a block that the result lists as failed are undefined: recompute it.
        """
        return self._submit(self._native.load, hashes, buffers, shards, wait_event, keep, writable=True)

    # Pages: memory that is registered once, and copied by the number of the page.

    def register_pages(
        self,
        bases: Addresses,
        strides: npt.NDArray[np.int64],
        page_count: int,
        keep: object = None,
        *,
        sizes: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        """Registers the pages of a paged cache: tensor ``t`` of page ``p`` begins at ``bases[t] + p * strides[t]``.

        Tensors are counted over all shards of the layout, in order. The memory must stay mapped until the store is
        closed.

        Args:
            bases: addresses of the tensors of page 0, ``uint64`` of shape ``(tensors,)``.
            strides: bytes from a page to the next, ``int64`` of shape ``(tensors,)``.
            page_count: number of pages.
            keep: object that is held until the store is closed and every task over these pages has ended, such as the
                memory's owner.
            sizes: sizes in bytes of the pieces of a page, ``uint64``, if they differ from the layout's tensors. Each
                piece has one base and one stride, and together, in order, they fill the layout's shards. ``None`` = the
                tensors.

        Raises:
            ConfigError: the numbers of bases, strides and pieces differ, or the pieces do not fill the shards.
        """
        self._native.register_pages(bases, strides, page_count, keep, sizes=sizes)

    def dump_pages(
        self,
        hashes: Sequence[bytes],
        pages: Sequence[int] | npt.NDArray[np.int64],
        *,
        wait_event: int = 0,
        priority: Priority = "normal",
        keep: object = None,
    ) -> Task:
        """Stores page ``pages[i]`` as block ``hashes[i]``. Blocks that the depot already has are not copied again.

        Args:
            hashes: hashes of the blocks.
            pages: number of each block's page.
            wait_event: CUDA event after which the pages may be read, a ``CUevent`` as an integer; 0 = now. It must not
                be recorded again until the task is done.
            priority: as for ``dump``.
            keep: object that is held until the copies have ended, such as the event's owner.

        Returns:
            The task. The pages must not change before it is done.

        Raises:
            ConfigError: no pages are registered, a page does not exist, a hash is not 1 to 64 bytes long, or no
                priority has this name.
            KVDepotError: the task was refused, because the store is closed or too many tasks wait.
        """
        pages = np.asarray(pages, dtype=np.int64)
        return Task(self._native.dump_pages(hashes, pages, wait_event=wait_event, priority=priority, keep=keep))

    def begin_dump_pages(
        self,
        hashes: Sequence[bytes],
        pages: Sequence[int] | npt.NDArray[np.int64],
        *,
        priority: Priority = "normal",
    ) -> Task:
        """Prepares ``dump_pages`` shard by shard: each is read only after ``Task.submit_shard``.

        A task that does not get all of its shards never ends; dropping it gives its room in the depot back.
        """
        pages = np.asarray(pages, dtype=np.int64)
        return Task(self._native.begin_dump_pages(hashes, pages, priority=priority))

    def load_pages(
        self,
        hashes: Sequence[bytes],
        pages: Sequence[int] | npt.NDArray[np.int64],
        *,
        wait_event: int = 0,
        patience_ms: int | None = None,
        keep: object = None,
    ) -> Task:
        """Loads block ``hashes[i]`` into page ``pages[i]``, shard by shard in order: see ``Task.wait_shard``.

        Args:
            hashes: hashes of the blocks.
            pages: number of each block's page.
            wait_event: CUDA event after which the pages may be written, as for ``dump_pages``. Work that the device
                still has to do then must not use them.
            patience_ms: how long to wait for blocks that are not in the pool, after the others were copied; ``None`` =
                until the task's time limit.
            keep: as for ``dump_pages``.

        Returns:
            The task. The bytes of a block that its result lists as failed are undefined: recompute it.

        Raises:
            ConfigError, KVDepotError: as for ``dump_pages``.
        """
        pages = np.asarray(pages, dtype=np.int64)
        return Task(self._native.load_pages(hashes, pages, wait_event=wait_event, patience_ms=patience_ms, keep=keep))

    def set_decoding(self, decoding: bool) -> None:
        """Sets whether the engine decodes from now on. Applies to all stores of the CUDA device.

        While it does, copies leave the device's multiprocessors alone, even if that is slower. Default: it does not.
        """
        self._native.set_decoding(decoding)

    def check(self, task: Task) -> bool:
        """Returns whether a task is done; see ``Task.done``."""
        return task.done()

    def wait(self, task: Task, timeout_ms: int | None = None) -> TaskResult:
        """Waits until a task is done; see ``Task.wait``."""
        return task.wait(timeout_ms)

    def drain(self, timeout_ms: int) -> bool:
        """Waits until everything dumped so far is written to the tiers. Returns false on timeout.

        Raises:
            UnavailableError, DepotTimeoutError: no depot answers.
        """
        self._check_open()
        return self._depot.drain(timeout_ms)

    def reset(self) -> None:
        """Makes every block dumped so far unreachable, in every tier. Call it after the model's weights changed.

        Raises:
            UnavailableError, DepotTimeoutError: the depot did not confirm the reset.
        """
        self._depot.reset([self.native_namespace])

    def stats(self) -> dict[str, Any]:
        """Returns counters and gauges of the depot and of this process's attachment."""
        stats: dict[str, Any] = json.loads(self._depot.stats_json())
        return stats

    def close(self, wait_ms: int | None = None) -> bool:
        """Refuses new tasks, and waits for those in flight. Idempotent.

        A store from ``kvdepot.open`` also detaches from its depot.

        Args:
            wait_ms: how long to wait; ``None`` = slightly longer than the tasks' time limit.

        Returns:
            Whether every task has ended, and every copy: on a device that hangs, a dump fails by its time limit, but
            its copy may still read. If not, they go on, and the memory that they touch stays held.
        """
        self._closed = True
        if os.getpid() != self._pid:
            return True  # another thread may have held a lock at the fork
        ended = self._native.close(self._timeout_ms + _CLOSE_GRACE_MS if wait_ms is None else wait_ms)
        if self._owns_namespace:
            self._namespace.close()
        if self.owns_attachment:
            self._depot.close()
        self.closed = True
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("the store is closed: open another one")

    def _submit(
        self,
        verb: Any,
        hashes: Sequence[bytes],
        buffers: Buffers,
        shards: Sequence[int] | None,
        wait_event: int,
        keep: object,
        *,
        writable: bool,
    ) -> Task:
        names = list(hashes)
        by_shard = list(self._layout.by_shard())
        tensors = len(by_shard[0])
        if any(len(sizes) != tensors for sizes in by_shard):
            raise ConfigError("the shards of a block have different numbers of tensors: register pages of such memory")
        rows_per_block = len(by_shard) if shards is None else 1
        if shards is None:
            shard_rows = np.tile(np.arange(rows_per_block, dtype=np.int64), len(names))
            sizes_of_rows: list[tuple[int, ...]] = [sum(by_shard, ())] * len(names)
        else:
            shard_rows = np.array(shards, dtype=np.int64)
            if shard_rows.shape != (len(names),):
                raise ConfigError(f"there must be one shard per hash: {len(names)}, got shape {shard_rows.shape}")
            if len(names) and not 0 <= shard_rows.min() <= shard_rows.max() < len(by_shard):
                raise ConfigError(f"shards: a block has shards 0 to {len(by_shard) - 1}, got {shard_rows.tolist()}")
            sizes_of_rows = [by_shard[shard] for shard in shard_rows.tolist()]
        addresses, owners = memory_of(buffers, sizes_of_rows, writable=writable, cuda_device=self._cuda_device)
        if rows_per_block > 1:
            names = [name for name in names for _ in range(rows_per_block)]
            addresses = addresses.reshape(-1, tensors)
        kept = owners if keep is None else (*owners, keep)
        if owners and self._cuda_device is not None and not wait_event:
            wait_event, event = after_torch(self._cuda_device)
            kept = (*kept, event)
        return Task(verb(names, shard_rows, addresses, kept, wait_event=wait_event), rows_per_block)
