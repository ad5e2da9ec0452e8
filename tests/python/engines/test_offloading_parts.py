"""The parts of the tier below vLLM's own offloading, without vLLM."""

import logging
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvdepot.engines.counters import Counters
from kvdepot.engines.offloading import metrics
from kvdepot.engines.offloading import room as rooms
from kvdepot.engines.offloading.answers import STALE_S, Answers, Batch, Verdict
from kvdepot.engines.offloading.asker import KEYS_MAX, THREADS, Asker
from kvdepot.engines.offloading.facts import CHUNK_BYTES_MAX, Engine, calling_engine, refuse_unsupported
from kvdepot.engines.offloading.jobs import FULL_AGAIN_S, FULL_S, Jobs
from kvdepot.engines.offloading.options import Options, read_options
from kvdepot.engines.offloading.room import Room
from kvdepot.errors import BusyError, ConfigError
from kvdepot.task import TaskResult

LATE_S = 1.0
UNTIL_S = 60.0
KEYS = [b"%03d" % number for number in range(8)]
POSITIONS = {key: 32 * (number + 1) for number, key in enumerate(KEYS)}
SMALL = {"pipeline": "Cache|Empty", "pool_gb": 0.25}


def counters() -> Counters:
    return Counters(lambda: logging.getLogger("test"))


# Options.


def test_keys_of_the_tier_stand_beside_keys_of_the_depot() -> None:
    options = read_options({**SMALL, "weights_version": 3, "on_reset": "keep", "locality": "LOCAL"})
    assert options.weights_version == "3"
    assert (options.on_reset, options.locality) == ("keep", "LOCAL")
    assert options.config.mode == "node"
    assert read_options(SMALL).on_reset == "apart"


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"on_reset": "drop"}, "on_reset"),
        ({"locality": "HERE"}, "locality"),
        ({"weights_version": 1.5}, "weights_version"),
        ({"adapters_version": True}, "adapters_version"),
        ({"root_dir": "/x"}, "root_dir"),
        ({"mode": "embedded"}, "mode"),
        ({"use_lite": True}, "use_lite"),
        ({"config": "/etc/kvdepot.yaml"}, "config"),
        ({"pipeline": "Staging|Posix", "directories": ["/tmp"]}, "pipeline"),
    ],
)
def test_a_wrong_key_is_named(said: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_options({**SMALL, **said})


# Engines that cannot be served.


def engine(**changes: Any) -> Engine:
    parallel = {"world_size": 1, "distributed_executor_backend": "uni", "nnodes_within_dp": 1}
    parallel.update({name: changes.pop(name) for name in list(changes) if name in parallel})
    vllm_config = {"lora_config": None, "weight_transfer_config": None, "model_config": None, **changes}
    return Engine(
        SimpleNamespace(**vllm_config, parallel_config=SimpleNamespace(**parallel)), SimpleNamespace(kv_cache_groups=[])
    )


def options(**changes: Any) -> Options:
    return read_options({**SMALL, **changes})


@pytest.fixture(autouse=True)
def _fixed_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.mark.parametrize(
    ("changes", "said", "chunk_bytes", "named"),
    [
        ({"world_size": 16, "distributed_executor_backend": "mp", "nnodes_within_dp": 2}, {}, 4096, "2 nodes"),
        ({"world_size": 2, "distributed_executor_backend": "ray"}, {}, 4096, "'ray'"),
        ({"lora_config": object()}, {}, 4096, "adapters_version"),
        ({"weight_transfer_config": object()}, {"on_reset": "keep"}, 4096, "on_reset"),
        ({}, {}, CHUNK_BYTES_MAX + 1, "blocks_per_chunk"),
    ],
)
def test_what_would_be_wrong_is_refused(
    changes: dict[str, Any], said: dict[str, Any], chunk_bytes: int, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        refuse_unsupported(engine(**changes), options(**said), chunk_bytes, 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, {}),
        ({"world_size": 8, "distributed_executor_backend": "mp"}, {}),
        ({"lora_config": object()}, {"adapters_version": "spring"}),
        ({"weight_transfer_config": object()}, {}),
    ],
)
def test_others_are_served(changes: dict[str, Any], said: dict[str, Any]) -> None:
    refuse_unsupported(engine(**changes), options(**said), 4096, 1)


def test_the_engine_is_found_among_the_callers() -> None:
    def make_tier() -> Engine:
        return calling_engine()

    def make_scheduler(vllm_config: Any, kv_cache_config: Any) -> Engine:
        return make_tier()

    made = engine()
    assert make_scheduler(*made) == made
    with pytest.raises(ConfigError, match=r"vLLM 0\.32"):
        make_tier()


# Answers.


def test_the_first_question_takes_the_rest_of_the_request_along() -> None:
    answers = Answers(LATE_S, len(KEYS))
    assert answers.of(KEYS[2], 0) is Verdict.UNASKED
    batch = answers.ask(KEYS[2], POSITIONS, 0)
    assert batch.keys == KEYS[2:]
    assert {answers.of(key, 0) for key in KEYS[2:]} == {Verdict.WAITING}
    batch.answer([True, True, False, False, False, False])
    assert [answers.of(key, 0.1) for key in KEYS[2:5]] == [Verdict.THERE, Verdict.THERE, Verdict.ABSENT]


def test_a_question_from_the_end_is_followed_by_one_for_all() -> None:
    """As for windows: two questions, however many keys."""
    answers = Answers(LATE_S, len(KEYS))
    assert answers.ask(KEYS[-1], POSITIONS, 0).keys == [KEYS[-1]]
    assert answers.of(KEYS[-2], 0) is Verdict.UNASKED
    assert answers.ask(KEYS[-2], POSITIONS, 0).keys == [KEYS[-2], *KEYS[:-2]]
    assert all(answers.of(key, 0) is Verdict.WAITING for key in KEYS)


def test_without_positions_each_key_is_a_question() -> None:
    answers = Answers(LATE_S, len(KEYS))
    assert answers.ask(KEYS[0], {}, 0).keys == [KEYS[0]]
    assert answers.of(KEYS[1], 0) is Verdict.UNASKED


def test_late_is_said_once_and_absent_from_then_on() -> None:
    answers = Answers(LATE_S, len(KEYS))
    batch = answers.ask(KEYS[0], POSITIONS, 0)
    assert answers.of(KEYS[0], LATE_S) is Verdict.LATE
    assert answers.of(KEYS[0], LATE_S) is answers.of(KEYS[5], LATE_S) is Verdict.ABSENT
    batch.answer([True] * len(KEYS))
    assert answers.of(KEYS[0], LATE_S) is Verdict.ABSENT


def test_a_request_that_waited_in_vain_asks_again_after_a_preemption_only() -> None:
    """A depot that hangs would otherwise delay it again every two seconds."""
    answers = Answers(LATE_S, len(KEYS))
    answers.ask(KEYS[0], POSITIONS, 0)
    assert answers.of(KEYS[0], LATE_S) is Verdict.LATE
    assert {answers.of(key, LATE_S + STALE_S + 0.1) for key in KEYS} == {Verdict.ABSENT}
    answers.restart()
    assert answers.of(KEYS[0], LATE_S + STALE_S + 0.1) is Verdict.UNASKED


def test_no_answer_is_absent() -> None:
    answers = Answers(LATE_S, len(KEYS))
    answers.ask(KEYS[0], POSITIONS, 0).answer(None)
    assert answers.of(KEYS[3], 0) is Verdict.ABSENT


def test_an_old_answer_is_asked_for_again_except_for_what_was_lost() -> None:
    """What could not be loaded must not be tried for ever by one request."""
    answers = Answers(LATE_S, len(KEYS))
    answers.ask(KEYS[0], POSITIONS, 0).answer([True] * len(KEYS))
    assert answers.of(KEYS[1], 0) is Verdict.THERE
    answers.lost([KEYS[1]])
    assert answers.of(KEYS[1], 0) is Verdict.ABSENT
    assert answers.of(KEYS[2], STALE_S + 0.1) is Verdict.UNASKED
    again = answers.ask(KEYS[2], POSITIONS, STALE_S + 0.1)
    again.answer([True] * len(again.keys))
    assert answers.of(KEYS[2], STALE_S + 0.2) is Verdict.THERE
    assert answers.of(KEYS[1], STALE_S + 0.2) is Verdict.ABSENT


def test_an_answer_from_before_it_was_forgotten_says_nothing() -> None:
    answers = Answers(LATE_S, len(KEYS))
    before = answers.ask(KEYS[0], POSITIONS, 0)
    answers.forget()
    before.answer([True] * len(KEYS))
    assert answers.of(KEYS[0], 0) is Verdict.UNASKED


def test_hits_are_no_more_than_vllm_can_hold() -> None:
    answers = Answers(LATE_S, 3)
    answers.ask(KEYS[0], POSITIONS, 0).answer([True] * len(KEYS))
    found = [Verdict.THERE] * 3 + [Verdict.ABSENT] * 5
    assert [answers.of(key, 0) for key in KEYS] == found
    assert [answers.of(key, 0) for key in KEYS] == found


def test_what_was_loaded_and_is_asked_for_again_is_absent_until_a_preemption() -> None:
    answers = Answers(LATE_S, 1)
    answers.ask(KEYS[0], POSITIONS, 0).answer([True] * len(KEYS))
    assert answers.of(KEYS[0], 0) is Verdict.THERE
    answers.loaded(KEYS[:1])
    assert answers.of(KEYS[0], 0) is Verdict.ABSENT
    answers.forget()
    assert answers.of(KEYS[0], 0) is Verdict.ABSENT
    answers.restart()
    answers.ask(KEYS[1], POSITIONS, 0).answer([True] * (len(KEYS) - 1))
    assert answers.of(KEYS[1], 0) is Verdict.THERE
    assert answers.of(KEYS[2], 0) is Verdict.ABSENT
    assert answers.of(KEYS[0], 0) is Verdict.UNASKED


def test_what_vllm_had_no_room_for_is_absent_until_a_preemption() -> None:
    answers = Answers(LATE_S, 3)
    answers.ask(KEYS[0], POSITIONS, 0).answer([True] * len(KEYS))
    assert not answers.promised
    assert [answers.of(key, 0) for key in KEYS[:3]] == [Verdict.THERE] * 3
    assert answers.promised
    answers.accepted(KEYS[:2])
    answers.step_over()
    assert not answers.promised
    assert answers.of(KEYS[2], 0) is Verdict.ABSENT
    # It has used no chunk of vLLM's memory.
    assert [answers.of(key, 0) for key in KEYS[3:5]] == [Verdict.THERE, Verdict.ABSENT]
    answers.restart()
    assert not answers.promised
    assert answers.of(KEYS[2], 0) is Verdict.UNASKED


# The threads that ask.


Panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


def no_trouble(error: BaseException) -> None:
    raise AssertionError(error)


class Depot:
    """Answers lookups when it is let."""

    def __init__(self, *there: bytes) -> None:
        self.there = there
        self.asked: list[list[bytes]] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def look(self, keys: Sequence[bytes]) -> list[bool] | None:
        self.asked.append(list(keys))
        self.begun.set()
        assert self.go_on.wait(UNTIL_S)
        return [key in self.there for key in keys]


def test_batches_that_wait_are_asked_for_together() -> None:
    asked: list[list[bytes]] = []
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def look(keys: Sequence[bytes]) -> list[bool]:
        asked.append(list(keys))
        begun.release()
        assert go_on.acquire(timeout=UNTIL_S)
        return [key == KEYS[3] for key in keys]

    asker = Asker(look, no_trouble)
    for _ in range(THREADS):
        asker.ask(Batch(KEYS[:1], 0))
    for _ in range(THREADS):
        assert begun.acquire(timeout=UNTIL_S)
    batches = [Batch(KEYS[:2], 0), Batch(KEYS[1:3], 0), Batch(KEYS[2:5], 0)]
    for batch in batches:
        asker.ask(batch)
    # One thread goes on; the others stay busy.
    go_on.release()
    assert begun.acquire(timeout=UNTIL_S)
    assert asked[THREADS:] == [KEYS[:5]]
    go_on.release(THREADS)
    assert all(batch.done.wait(UNTIL_S) for batch in batches)
    asker.close()
    assert [batch.found for batch in batches] == [[False, False], [False, False], [False, True, False]]


def test_a_slow_lookup_does_not_delay_others() -> None:
    slow = Depot()

    def look(keys: Sequence[bytes]) -> list[bool] | None:
        return slow.look(keys) if KEYS[0] in keys else [True] * len(keys)

    asker = Asker(look, no_trouble)
    first, second = Batch(KEYS[:1], 0), Batch(KEYS[1:3], 0)
    asker.ask(first)
    assert slow.begun.wait(UNTIL_S)
    asker.ask(second)
    assert second.done.wait(UNTIL_S)
    assert not first.done.is_set()
    slow.go_on.set()
    assert first.done.wait(UNTIL_S)
    asker.close()


def test_a_long_request_is_asked_for_in_parts() -> None:
    depot = Depot()
    depot.go_on.set()
    asker = Asker(depot.look, no_trouble)
    batch = Batch([b"%06d" % number for number in range(KEYS_MAX + 5)], 0)
    asker.ask(batch)
    assert batch.done.wait(UNTIL_S)
    asker.close()
    assert [len(keys) for keys in depot.asked] == [KEYS_MAX, 5]


def test_an_asker_without_an_answer_gives_none() -> None:
    asker = Asker(lambda keys: None, no_trouble)
    batch = Batch(KEYS, 0)
    asker.ask(batch)
    assert batch.done.wait(UNTIL_S)
    asker.close()
    assert batch.found is None


@pytest.mark.parametrize("raised", [RuntimeError("broken"), Panic("broken")])
def test_no_error_ends_the_threads_that_ask(raised: BaseException) -> None:
    broken = [raised] * 2 * THREADS
    told: list[BaseException] = []

    def look(keys: Sequence[bytes]) -> list[bool]:
        if broken:
            raise broken.pop()
        return [True] * len(keys)

    asker = Asker(look, told.append)
    batches = [Batch(KEYS[:1], 0) for _ in range(2 * THREADS + 1)]
    for batch in batches:
        asker.ask(batch)
        assert batch.done.wait(UNTIL_S)
    asker.close()
    assert [batch.found for batch in batches] == [None] * 2 * THREADS + [[True]]
    assert told == [raised] * 2 * THREADS


# Jobs.


class Task:
    """A task that ends when it is told to."""

    def __init__(self, failed: Sequence[int] = (), kinds: dict[str, int] | None = None, *, done: bool = True) -> None:
        self._failed, self._kinds, self._done = list(failed), kinds or {}, done
        self.waited = False

    def done(self) -> bool:
        return self._done

    def wait_done(self) -> bool:
        self.waited = self._done = True
        return True

    def result(self) -> TaskResult:
        assert self._done
        return TaskResult(np.array(self._failed, dtype=np.int64), self._kinds)


class Tasks:
    """Gives one task after another."""

    def __init__(self, *tasks: Task | None) -> None:
        self._tasks = list(tasks)
        self.begun: list[tuple[str, list[bytes], list[int]]] = []

    def begin(self, verb: str, keys: Sequence[bytes], addresses: Any) -> Task | None:
        self.begun.append((verb, list(keys), addresses.tolist()))
        return self._tasks.pop(0)


def test_a_job_is_reported_when_nothing_copies_any_more() -> None:
    task = Task(done=False)
    counted = counters()
    jobs = Jobs(Tasks(task).begin, counted)
    jobs.start(7, "load", KEYS[:2], [4096, 8192], 1.0)
    assert jobs.ended(1.5) == []
    assert len(jobs) == 1
    task.wait_done()
    (ended,) = jobs.ended(2.0)
    assert (ended.job_id, ended.verb, ended.failed, ended.seconds) == (7, "load", [], 1.0)
    assert len(jobs) == 0
    assert counted.snapshot() == {"loaded": 2}


def test_what_failed_is_told_by_key_and_counted_by_kind() -> None:
    counted = counters()
    jobs = Jobs(Tasks(Task([1], {"corrupt": 1})).begin, counted)
    jobs.start(7, "load", KEYS[:3], [0, 1, 2], 0)
    (ended,) = jobs.ended(0)
    assert ended.failed == [KEYS[1]]
    assert counted.snapshot() == {"load_corrupt": 1, "loaded": 2}


def test_a_refused_job_ends_at_once() -> None:
    jobs = Jobs(Tasks(None).begin, counters())
    jobs.start(1, "dump", KEYS[:2], [0, 1], 0)
    jobs.refuse(2, "dump", KEYS[2:3])
    assert [(ended.job_id, list(ended.failed)) for ended in jobs.ended(0)] == [(1, KEYS[:2]), (2, KEYS[2:3])]


def test_what_a_full_pool_refuses_is_dumped_again_for_a_while() -> None:
    full = {"no_space": 1}
    tasks = Tasks(Task([1], {"no_space": 1}), Task([0], full), Task())
    jobs = Jobs(tasks.begin, counters())
    jobs.start(1, "dump", KEYS[:3], [0, 10, 20], 0)
    assert jobs.ended(0) == []
    assert jobs.ended(FULL_AGAIN_S / 2) == []
    assert len(tasks.begun) == 1
    assert jobs.ended(FULL_AGAIN_S) == []
    assert jobs.ended(FULL_AGAIN_S) == []
    assert jobs.ended(2 * FULL_AGAIN_S) == []
    (ended,) = jobs.ended(2 * FULL_AGAIN_S)
    assert ended.failed == []
    assert tasks.begun[1:] == [("dump", [KEYS[1]], [10])] * 2


def test_a_pool_that_stays_full_is_a_failure() -> None:
    counted = counters()
    jobs = Jobs(Tasks(Task([0], {"busy": 1})).begin, counted)
    jobs.start(1, "dump", KEYS[:1], [0], 0)
    (ended,) = jobs.ended(FULL_S)
    assert ended.failed == KEYS[:1]
    assert counted.snapshot() == {"dump_busy": 1}


def test_a_drain_waits_for_what_runs_and_tries_nothing_again() -> None:
    running, full = Task(done=False), Task([0], {"no_space": 1})
    jobs = Jobs(Tasks(running, full).begin, counters())
    jobs.start(1, "load", KEYS[:1], [0], 0)
    jobs.start(2, "dump", KEYS[:1], [0], 0)
    jobs.drain(1)
    assert running.waited
    assert [(ended.job_id, len(ended.failed)) for ended in jobs.ended(1)] == [(1, 0), (2, 1)]
    assert len(jobs) == 0


class Panics:
    """A task whose calls panic in the core, from ``done`` on or after it."""

    def __init__(self, *, done: bool | None) -> None:
        self._done = done

    def done(self) -> bool:
        if self._done is None:
            raise Panic("broken")
        return self._done

    def wait_done(self) -> Any:
        raise Panic("broken")

    result = wait_done


def test_a_task_that_panics_ends_as_failed_and_one_without_an_end_stays_pinned() -> None:
    counted = counters()
    jobs = Jobs(Tasks(Panics(done=True), Panics(done=None), Task()).begin, counted)
    for job_id in range(3):
        jobs.start(job_id, "load", KEYS[:2], [0, 1], 0)
    assert [(ended.job_id, list(ended.failed)) for ended in jobs.ended(0)] == [(0, KEYS[:2]), (2, [])]
    assert len(jobs) == 1
    assert counted.snapshot()["load_error"] == 2
    jobs.drain(1)
    assert [(ended.job_id, list(ended.failed)) for ended in jobs.ended(1)] == [(1, KEYS[:2])]
    assert len(jobs) == 0


def test_a_result_that_makes_no_sense_fails_its_own_job_only() -> None:
    counted = counters()
    tasks = Tasks(Task(), Task([7], {"corrupt": 1}), Task())
    jobs = Jobs(tasks.begin, counted)
    for job_id in range(3):
        jobs.start(job_id, "load", KEYS[:2], [0, 1], 0)
    assert [(ended.job_id, list(ended.failed)) for ended in jobs.ended(0)] == [(0, []), (1, KEYS[:2]), (2, [])]
    assert counted.snapshot() == {"errors": 1, "load_error": 2, "loaded": 4}
    assert jobs.ended(0) == []
    assert len(tasks.begun) == 3


def test_a_drain_ends_all_jobs_whatever_their_results_are() -> None:
    counted = counters()
    jobs = Jobs(Tasks(Task([7], {"corrupt": 1}, done=False), Task(done=False)).begin, counted)
    for job_id in range(2):
        jobs.start(job_id, "load", KEYS[:2], [0, 1], 0)
    jobs.drain(1)
    assert [(ended.job_id, list(ended.failed)) for ended in jobs.ended(1)] == [(0, KEYS[:2]), (1, [])]
    assert counted.snapshot()["load_error"] == 2


class Interrupted(Task):
    """A task during whose first poll the process is asked to exit."""

    asked = False

    def done(self) -> bool:
        if not self.asked:
            self.asked = True
            raise KeyboardInterrupt
        return True


def test_a_job_that_ended_is_reported_once_although_the_poll_was_interrupted() -> None:
    """It would otherwise begin again, with chunks that vLLM has given to others."""
    tasks = Tasks(Task(), Interrupted())
    jobs = Jobs(tasks.begin, counters())
    for job_id in range(2):
        jobs.start(job_id, "load", KEYS[:2], [0, 1], 0)
    with pytest.raises(KeyboardInterrupt):
        jobs.ended(0)
    assert len(jobs) == 2
    assert [ended.job_id for ended in jobs.ended(0)] == [0, 1]
    assert len(jobs) == 0
    assert len(tasks.begun) == 2


# The room.


class Store:
    def __init__(self, namespace: Any) -> None:
        self.namespace, self.closed = namespace, False
        self.found: Any = np.array([True])

    def lookup(self, keys: Sequence[bytes]) -> Any:
        if isinstance(self.found, BaseException):
            raise self.found
        return self.found

    def load(self, keys: Sequence[bytes], addresses: Any) -> Any:
        return keys, addresses.tolist()

    def close(self, wait_ms: int) -> None:
        self.closed = True


class Attached:
    def __init__(self) -> None:
        self.attached, self.trouble = True, ""
        self.facts: list[dict[str, Any]] = []
        self.stores: list[Store] = []
        self.resets: list[str] = []
        self.closed: list[str] = []
        self.resets_fail = False
        self.busy = 0

    def answer(self) -> None:
        if self.busy:
            self.busy -= 1
            raise BusyError("no connection is free")

    def open_namespace(self, facts: dict[str, Any], *, layout: list[int]) -> Any:
        assert layout == [4096]
        self.answer()
        self.facts.append(facts)
        name = f"n{len(self.facts)}"
        return SimpleNamespace(id=name, close=lambda: self.closed.append(name))

    def open(self, *, namespace: Any, timeout_ms: int) -> Store:
        assert timeout_ms == 10_000
        self.stores.append(Store(namespace))
        return self.stores[-1]

    def reset(self, namespaces: Sequence[Any]) -> None:
        if self.resets_fail:
            raise Panic("broken")
        self.answer()
        self.resets += [namespace.id for namespace in namespaces]

    def stats(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.attached = False


@pytest.fixture
def depot() -> Attached:
    return Attached()


@pytest.fixture
def counted() -> Counters:
    return counters()


@pytest.fixture
def room(depot: Attached, counted: Counters) -> Room:
    config = read_options({**SMALL, "socket": "/tmp/none.sock"}).config
    return Room(config, {"model": "m"}, 4096, counted, connect=lambda config, engine_id: depot)


def test_a_room_counts_what_is_asked_and_found(room: Room, counted: Counters) -> None:
    assert room.lookup([KEYS[0]]) is not None
    assert counted.snapshot() == {"asked": 1, "hit": 1, "lookups": 1}


def test_a_lookup_that_fails_is_counted_by_kind(room: Room, depot: Attached, counted: Counters) -> None:
    depot.stores[0].found = RuntimeError("broken")
    assert room.lookup(KEYS) is None
    depot.stores[0].found = Panic("broken")
    assert room.lookup(KEYS) is None
    depot.stores[0].found = np.zeros(len(KEYS), dtype=bool)
    depot.attached = False
    assert room.lookup(KEYS) is None
    assert counted.snapshot() == {"lookups": 3, "miss_error": 16, "miss_no_depot": 8}


def test_chunks_go_by_their_addresses(room: Room, depot: Attached, counted: Counters) -> None:
    addresses = np.array([4096, 12288], dtype=np.uint64)
    assert room.move("load", KEYS[:2], addresses) == (KEYS[:2], [[4096], [12288]])
    depot.attached = False
    assert room.move("load", KEYS[:2], addresses) is None
    assert room.move("dump", KEYS[:3], np.zeros(3, dtype=np.uint64)) is None
    assert counted.snapshot() == {"dump_no_depot": 3, "load_no_depot": 2}


def test_apart_is_another_namespace_and_is_emptied_by_the_next_reset(room: Room, depot: Attached) -> None:
    assert all(room.go_apart() for _ in range(3))
    assert len({facts["weights_version"] for facts in depot.facts[1:]}) == len(depot.facts) - 1 == 1
    assert depot.resets == ["n2", "n2"]
    assert depot.closed == ["n1"]
    assert all(facts["model"] == "m" for facts in depot.facts)
    assert [store.closed for store in depot.stores] == [True, False]
    assert room.namespace_id == "n2"


def test_a_namespace_that_cannot_be_emptied_is_left(room: Room, depot: Attached) -> None:
    depot.resets_fail = True
    assert all(room.go_apart() for _ in range(2))
    assert len({facts.get("weights_version") for facts in depot.facts}) == 3
    assert depot.closed == ["n1", "n2"]
    assert [store.closed for store in depot.stores] == [True, True, False]
    assert room.namespace_id == "n3"


def test_a_reset_asks_a_busy_depot_again(room: Room, depot: Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "BUSY_AGAIN_S", 0)
    monkeypatch.setattr(rooms, "RESET_S", 60)
    for number in range(2):
        depot.busy = 3
        assert room.go_apart()
        assert depot.busy == 0
        assert room.namespace_id == "n2"
        assert depot.resets == ["n2"] * number
    assert room.attached


def test_a_depot_that_stays_busy_ends_a_reset(
    room: Room, depot: Attached, counted: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "RESET_S", 0)
    depot.busy = 2
    assert not room.go_apart()
    assert depot.busy == 1
    assert not room.attached
    assert counted.snapshot() == {"miss_off": 1}


# Metrics.


def test_counts_are_vllm_s_counters_by_kind() -> None:
    changes = metrics.Changes()
    found = changes.since({"dumped": 3, "dump_no_space": 2, "miss_no_depot": 1, "again": 9})
    assert found == [
        ("vllm:kvdepot_offload_stored_chunks", (), 3),
        ("vllm:kvdepot_offload_store_failed_chunks", ("no_space",), 2),
        ("vllm:kvdepot_offload_missed_chunks", ("no_depot",), 1),
    ]
    assert changes.since({"dumped": 5, "dump_no_space": 2}) == [("vllm:kvdepot_offload_stored_chunks", (), 2)]
    assert changes.since({"dumped": 5}) == []
