"""Transfers between vLLM's chunks and the depot, and their results.

vLLM pins a job's chunks until the job is reported as ended. So a job is not reported while anything may still copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdepot.engines.counters import Counters
from kvdepot.engines.offloading.room import Verb
from kvdepot.errors import is_failure

FULL = ("busy", "no_space")
"""Failures of a dump that only mean that the depot is busy or full for now. Such a dump is retried."""
FULL_AGAIN_S = 0.05
FULL_S = 3.0
"""Seconds during which a dump is retried. Meanwhile its chunks occupy vLLM's memory."""

Begin = Callable[[Verb, Sequence[bytes], npt.NDArray[np.uint64]], Any]


@dataclass(frozen=True)
class Ended:
    """A job that is over.

    Attributes:
        job_id: vLLM's ID.
        verb: ``dump`` or ``load``.
        keys: all keys of the job.
        failed: the keys that failed.
        seconds: duration.
    """

    job_id: int
    verb: Verb
    keys: Sequence[bytes]
    failed: Sequence[bytes]
    seconds: float


@dataclass
class _Job:
    job_id: int
    verb: Verb
    keys: Sequence[bytes]
    addresses: npt.NDArray[np.uint64]
    began_s: float
    task: Any = None
    rest: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    kinds: dict[str, int] = field(default_factory=dict)
    again_s: float = 0.0


class Jobs:
    """All jobs of a tier. Not thread-safe."""

    def __init__(self, begin: Begin, counters: Counters) -> None:
        """``begin`` starts a task. It returns ``None`` if the task is refused, and counts the refusal."""
        self._begin = begin
        self._counters = counters
        self._under_way: dict[int, _Job] = {}
        self._ended: list[Ended] = []

    def __len__(self) -> int:
        """Number of jobs that have not been reported."""
        return len(self._under_way) + len(self._ended)

    def start(self, job_id: int, verb: Verb, keys: Sequence[bytes], addresses: Any, now_s: float) -> None:
        """Starts a job. ``addresses`` has one address per key."""
        job = _Job(job_id, verb, keys, np.asarray(addresses, dtype=np.uint64), now_s)
        job.rest = np.arange(len(keys), dtype=np.int64)
        self._submit(job)
        if job.task is None:
            self._end(job, now_s)
        else:
            self._under_way[job_id] = job

    def refuse(self, job_id: int, verb: Verb, keys: Sequence[bytes]) -> None:
        """Reports a job as failed without starting it."""
        self._ended.append(Ended(job_id, verb, keys, keys, 0.0))

    def ended(self, now_s: float) -> list[Ended]:
        """Returns the jobs that ended since the last call. Never waits."""
        for job in list(self._under_way.values()):
            goes_on = self._attempt(partial(self._goes_on, job, now_s))
            if goes_on is None:
                goes_on = self._broken(job)
            if not goes_on:
                self._end(job, now_s)
        ended, self._ended = self._ended, []
        return ended

    def drain(self, now_s: float) -> None:
        """Waits for all tasks. Nothing is retried."""
        for job in list(self._under_way.values()):
            if job.task is not None:
                # Ends at the store's time limit: vLLM's memory is in use until then.
                self._attempt(job.task.wait_done)
                if self._attempt(partial(self._take, job)) is None:
                    self._broken(job)
            self._end(job, now_s)

    def _goes_on(self, job: _Job, now_s: float) -> bool:
        if job.task is not None:
            if not self._attempt(job.task.done):
                # A task whose state is unknown may still copy, so its chunks stay pinned.
                return True
            self._take(job)
            full = job.verb == "dump" and bool(job.kinds) and all(kind in FULL for kind in job.kinds)
            if not full or now_s - job.began_s >= FULL_S:
                return False
            job.again_s = now_s + FULL_AGAIN_S
        if now_s < job.again_s:
            return True
        self._counters.add("again", len(job.rest))
        self._submit(job)
        return job.task is not None

    def _submit(self, job: _Job) -> None:
        job.kinds = {}
        job.task = self._begin(job.verb, [job.keys[row] for row in job.rest.tolist()], job.addresses[job.rest])

    def _broken(self, job: _Job) -> bool:
        """Marks a job whose result is unknown as failed. Returns whether its task may still copy."""
        job.kinds = {"error": len(job.rest)}
        return job.task is not None

    def _take(self, job: _Job) -> bool:
        """Takes the result of a task that is done. Always returns ``True``, so that ``None`` means that it raised."""
        task, job.task = job.task, None
        result = self._attempt(task.result)
        if result is None:
            self._broken(job)
            return True
        job.rest = job.rest[np.asarray(result.failed, dtype=np.int64)]
        job.kinds = dict(result.failures)
        return True

    def _attempt(self, call: Callable[[], Any]) -> Any:
        """Returns what ``call`` returns; ``None`` if it fails."""
        try:
            return call()
        except BaseException as error:
            if not is_failure(error):
                raise
            self._counters.trouble("errors", f"the result of a transfer is unknown: {error!r}")
            return None

    def _end(self, job: _Job, now_s: float) -> None:
        # Removed first: a reported job must neither begin again nor be reported twice.
        self._under_way.pop(job.job_id, None)
        failed = [job.keys[row] for row in job.rest.tolist()]
        self._ended.append(Ended(job.job_id, job.verb, job.keys, failed, now_s - job.began_s))
        for kind, count in job.kinds.items():
            self._counters.trouble(f"{job.verb}_{kind}", f"{count} chunks of a {job.verb} failed: {kind}", count)
        self._counters.add(f"{job.verb}ed", len(job.keys) - len(job.rest))
