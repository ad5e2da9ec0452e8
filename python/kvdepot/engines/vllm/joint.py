"""Several tasks over the same blocks, combined into one: those of a block's slices."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvdepot import Task, TaskResult


class JointTask:
    """The part of ``Task``'s interface that the connector uses. A block is complete when every task has it."""

    def __init__(self, tasks: Sequence["Task"], refused: str = "") -> None:
        """``refused``: kind of the error with which a further task was refused; then no block is complete."""
        self._tasks = tasks
        self._refused = refused

    @property
    def block_count(self) -> int:
        """Blocks of each task."""
        return self._tasks[0].block_count

    def done(self) -> bool:
        """Returns whether all tasks have ended."""
        return all(task.done() for task in self._tasks)

    def wait_done(self, timeout_ms: int | None = None) -> bool:
        """Waits until all tasks have ended. Returns false on timeout."""
        left_ms = _countdown(timeout_ms)
        return all(task.wait_done(left_ms()) for task in self._tasks)

    def wait_shard(self, shard: int, *, timeout_ms: int | None = None) -> bool:
        """Waits until this shard of every block has ended in all tasks. Returns false on timeout."""
        left_ms = _countdown(timeout_ms)
        return all(task.wait_shard(shard, timeout_ms=left_ms()) for task in self._tasks)

    def wait_shard_on(self, shard: int, *, stream: int, timeout_ms: int | None = None) -> bool:
        """Makes a device's stream wait for this shard of all tasks. Returns false if that was not submitted in time."""
        left_ms = _countdown(timeout_ms)
        return all(task.wait_shard_on(shard, stream=stream, timeout_ms=left_ms()) for task in self._tasks)

    def submit_shard(self, shard: int, *, wait_event: int = 0, keep: object = None) -> None:
        """Allows this shard of every block to be read, for all tasks."""
        for task in self._tasks:
            task.submit_shard(shard, wait_event=wait_event, keep=keep)

    def result(self) -> "TaskResult":
        """Returns the outcome: a block fails if some task lacks it, and counts once for each task that does."""
        from kvdepot import TaskResult

        found = {self._refused: self.block_count} if self._refused else {}
        results = [task.result() for task in self._tasks]
        for result in results:
            for kind, count in result.failures.items():
                found[kind] = found.get(kind, 0) + count
        if self._refused:
            return TaskResult(np.arange(self.block_count, dtype=np.int64), found)
        return TaskResult(np.unique(np.concatenate([result.failed for result in results])), found)


def _countdown(timeout_ms: int | None) -> "_Left":
    return _Left(None if timeout_ms is None else time.monotonic() + timeout_ms / 1e3)


class _Left:
    """Remaining milliseconds of a time limit that several tasks share."""

    def __init__(self, end_s: float | None) -> None:
        self._end_s = end_s

    def __call__(self) -> int | None:
        return None if self._end_s is None else max(0, round((self._end_s - time.monotonic()) * 1e3))
