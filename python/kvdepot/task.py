"""A dump or a load in flight, to wait for or to await."""

import asyncio
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdepot import _native, errors

_ERROR_OF_KIND: Mapping[str, type[errors.KVDepotError]] = {
    "not_found": errors.BlockNotFoundError,
    "no_space": errors.NoSpaceError,
    "corrupt": errors.CorruptError,
    "timeout": errors.DepotTimeoutError,
    "busy": errors.BusyError,
    "unavailable": errors.UnavailableError,
    "closed": errors.UnavailableError,
    "unsupported": errors.UnsupportedError,
    "protocol": errors.ProtocolError,
    "version": errors.ProtocolError,
    "config": errors.ConfigError,
}
_REMEDY_OF_KIND: Mapping[str, str] = {
    "no_space": "all of the pool is in use: try these blocks again a little later, release claims, or give the pool "
    "more memory (pool_gb)",
    "busy": "the depot fills or writes as much as it may at a time: try these blocks again a little later, or give the "
    "pool more memory (pool_gb)",
}


@dataclass(frozen=True)
class TaskResult:
    """Outcome of a task.

    Attributes:
        failed: indexes of the blocks that were not stored or not loaded, ascending.
        failures: number of failed blocks by kind: ``not_found``, ``no_space``, ``timeout`` …
    """

    failed: npt.NDArray[np.int64]
    failures: Mapping[str, int]

    @property
    def ok(self) -> bool:
        """Whether every block was stored or loaded."""
        return len(self.failed) == 0

    def raise_for_failures(self) -> None:
        """Raises the typed error of the most common kind of failure. Returns if nothing failed.

        Raises:
            KVDepotError: a block failed; ``kind`` is the kind of failure.
        """
        if self.ok:
            return
        kind = max(self.failures, key=self.failures.__getitem__, default="io")
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.failures.items()))
        remedy = f": {_REMEDY_OF_KIND[kind]}" if kind in _REMEDY_OF_KIND else ""
        error = _ERROR_OF_KIND.get(kind, errors.StorageError)(
            f"{len(self.failed)} blocks failed ({counts}), the first at index {self.failed[0]}{remedy}"
        )
        error.kind = kind
        raise error


class Task:
    """A dump or a load in flight. It runs on even if this object is dropped, and holds its tensors until it has ended.

    A task has ended when no copy touches its memory any more. Usually that is when it is done. After a timeout on a
    device that hangs, the tensors are held longer, until the device has finished with them.

    ``await task`` waits without blocking the event loop and returns the ``TaskResult``, as ``wait`` does.

    Thread safety: any number of threads may use one task concurrently, and wait for it. In a process forked from the
    one that created it, every call raises ``UnavailableError``.
    """

    __slots__ = ("__weakref__", "_native", "_rows_per_block")

    def __init__(self, native: _native.Task, rows_per_block: int = 1) -> None:
        self._native = native
        self._rows_per_block = rows_per_block

    def __repr__(self) -> str:
        try:
            return f"<kvdepot.Task {self.id}: {self.block_count} blocks, {'done' if self.done() else 'in flight'}>"
        except errors.UnavailableError:
            return "<kvdepot.Task of another process>"

    @property
    def id(self) -> int:
        """Number of the task in the logs."""
        return self._native.id

    @property
    def block_count(self) -> int:
        """Number of blocks of the task, those that fail included."""
        return self._native.block_count // self._rows_per_block

    def done(self) -> bool:
        """Returns whether the caller may reuse the task's memory (dump) or read it (load)."""
        return self._native.done()

    def wait_done(self, timeout_ms: int | None = None) -> bool:
        """Waits until the task is done, as ``wait``. Returns false, and raises nothing, if the time passed first."""
        return self._native.wait(timeout_ms)

    def wait(self, timeout_ms: int | None = None) -> TaskResult:
        """Waits until the task is done.

        Args:
            timeout_ms: how long to wait; ``None`` waits until the task finishes, which ``timeout_ms`` of the
                configuration bounds.

        Returns:
            The result, as ``result`` returns it.

        Raises:
            DepotTimeoutError: the time passed first. The task goes on, and its memory must stay untouched.
        """
        if not self._native.wait(timeout_ms):
            raise errors.DepotTimeoutError(f"task {self.id} is not done after {timeout_ms} ms: wait again")
        return self.result()

    def result(self) -> TaskResult:
        """Returns the outcome of a task that is done.

        Raises:
            BusyError: the task is not done yet.
        """
        if not self.done():
            raise errors.BusyError(f"task {self.id} is not done: wait for it first")
        # Grouped in the core, because np.unique takes the interpreter lock in a C++ destructor: in a daemon thread that
        # would kill the process at interpreter shutdown.
        rows = self._rows_per_block
        return TaskResult(self._native.failed(rows), self._native.failures(rows))

    def wait_shard(self, shard: int, *, timeout_ms: int | None = None) -> bool:
        """Waits until a shard of every block is in place (load) or was copied out (dump), or has failed.

        Args:
            shard: number of the shard, from 0.
            timeout_ms: how long to wait; ``None`` waits until the task's own time limit.

        Returns:
            Whether that was in time.
        """
        return self._native.wait_shard(shard, timeout_ms=timeout_ms)

    def wait_shard_on(self, shard: int, *, stream: int, timeout_ms: int | None = None) -> bool:
        """For a load on a CUDA device: makes a stream wait for a shard of every block, instead of this thread.

        Returns as soon as all copies were submitted to the device. On copy engines without streams this is
        ``wait_shard``.

        Args:
            shard: number of the shard, from 0.
            stream: the stream, a ``CUstream`` as an integer.
            timeout_ms: how long to wait for the submission; ``None`` waits until the task's own time limit.

        Returns:
            Whether the copies were submitted in time.
        """
        return self._native.wait_shard_on(shard, stream=stream, timeout_ms=timeout_ms)

    def submit_shard(self, shard: int, *, wait_event: int = 0, keep: object = None) -> None:
        """For a task of ``Store.begin_dump_pages``: allows a shard of every block to be read.

        Args:
            shard: number of the shard, from 0.
            wait_event: CUDA event after which it may be read, a ``CUevent`` as an integer; 0 = now. It must not be
                recorded again until the task is done.
            keep: object that is held until the shard's copy has ended, such as the event's owner.
        """
        self._native.submit_shard(shard, wait_event=wait_event, keep=keep)

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when the task is done. The task owns it."""
        return self._native.fileno()

    def __await__(self) -> Generator[Any, None, TaskResult]:
        return self._wait_readable().__await__()

    async def _wait_readable(self) -> TaskResult:
        if not self.done():
            loop = asyncio.get_running_loop()
            ready: asyncio.Future[None] = loop.create_future()
            # An event loop has one reader per descriptor, so every awaiter registers its own duplicate.
            descriptor = os.dup(self._native.fileno())
            try:
                loop.add_reader(descriptor, _settle, ready)
                await ready
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        return self.result()


def _settle(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)
