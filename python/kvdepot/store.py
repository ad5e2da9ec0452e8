"""Blocks of one namespace: the ``Store`` that ``kvdepot.open`` and ``Depot.open`` return."""

import json
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from kvdepot import _native
from kvdepot.config import KVDepotConfig
from kvdepot.errors import ConfigError, UnavailableError
from kvdepot.layout import BlockLayout
from kvdepot.memory import Buffers, memory_of
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
        layout: BlockLayout,
        depot: _native.Depot,
        native: _native.Store,
        cuda_device: int | None = None,
    ) -> None:
        self._config = config
        self._cuda_device = cuda_device
        self._layout = layout
        self._depot = depot
        self._native = native
        self.owns_attachment = False
        """Whether ``close`` detaches from the depot, too."""
        self.on_close: Callable[[], None] | None = None
        """Called by ``close``, after all tasks have ended or timed out. May be called several times."""
        self._closed = False
        self._pid = os.getpid()

    @property
    def native_namespace(self) -> _native.Namespace:
        """The namespace, for calls of the depot.

        Raises:
            UnavailableError: the store is closed.
        """
        self._check_open()
        return self._native.namespace

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
        return self._native.namespace.id

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

    def dump(self, hashes: Sequence[bytes], buffers: Buffers, shards: Sequence[int] | None = None) -> Task:
        """Stores blocks.

        Args:
            hashes: hash of the block of each row.
            buffers: one row of tensors for each hash: torch tensors (or numpy arrays in host memory), contiguous, with
                the layout's sizes, without Python objects. The store keeps a reference to each until no copy touches it
                any more, whatever happens to ``buffers`` and the task. Or the tensors' addresses as a ``uint64`` array
                of shape ``(rows, tensors)``, whose memory the caller keeps allocated until the task is done.
            shards: shard of each row, which then has the tensors of that shard. ``None`` = whole blocks: a row has the
                tensors of all shards in order.

        Returns:
            The task. The memory must not change before it is done. ``lookup`` finds a block once all its shards were
            stored, by one task or several.

        Raises:
            ConfigError: sizes or counts do not fit the layout, a hash is not 1 to 64 bytes long, or an array holds
                Python objects. Nothing was stored.
            UnsupportedError: a tensor is not in the memory that the store was opened for.
        """
        return self._submit(self._native.dump, hashes, buffers, shards, writable=False)

    def load(self, hashes: Sequence[bytes], buffers: Buffers, shards: Sequence[int] | None = None) -> Task:
        """Loads blocks into ``buffers``. Arguments, result and errors as for ``dump``.

        The bytes of a block that the result lists as failed are undefined: recompute it.
        """
        return self._submit(self._native.load, hashes, buffers, shards, writable=True)

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

    def close(self) -> None:
        """Waits for tasks in flight, slightly longer than ``timeout_ms``. Idempotent.

        A store from ``kvdepot.open`` also detaches from its depot.
        """
        self._closed = True
        if os.getpid() != self._pid:
            return  # another thread may have held a lock at the fork
        self._native.close(self._config.timeout_ms + _CLOSE_GRACE_MS)
        if self.on_close is not None:
            self.on_close()
        if self.owns_attachment:
            self._depot.close()

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
        self, verb: Any, hashes: Sequence[bytes], buffers: Buffers, shards: Sequence[int] | None, *, writable: bool
    ) -> Task:
        names = list(hashes)
        rows_per_block = self._layout.shards if shards is None else 1
        sizes = self._layout.tensor_sizes_bytes * rows_per_block
        addresses, owners = memory_of(buffers, len(names), sizes, writable=writable, cuda_device=self._cuda_device)
        if shards is None:
            shard_rows = np.tile(np.arange(rows_per_block, dtype=np.int64), len(names))
            names = [name for name in names for _ in range(rows_per_block)]
            addresses = addresses.reshape(-1, len(self._layout.tensor_sizes_bytes))
        else:
            shard_rows = np.array(shards, dtype=np.int64)
            if shard_rows.shape != (len(names),):
                raise ConfigError(f"there must be one shard per hash: {len(names)}, got shape {shard_rows.shape}")
        return Task(verb(names, shard_rows, addresses, owners), rows_per_block)
