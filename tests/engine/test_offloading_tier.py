"""The tier below vLLM's own tiering manager and memory, without an engine, above a depot that may hang or be gone."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.lab.depot import depot_stats
from tools.lab.pause import pause

CHUNKS, CHUNK_BYTES = 16, 8192
WAIT_S = 60
CALL_MS = 15_000
"""Time limit of most calls. A lookup has ``WAIT_S`` instead, and loses the depot when it exceeds that."""
CHUNK_TOKENS = 32
FULL, WINDOWS = 0, 1
"""Cache groups."""
PROBES = 20
"""Requests that look chunks up while the depot hangs. All must be done within ``WAIT_S`` of the first lookup."""
FOREVER_S = 3600.0
CORE = '{"pipeline":"Cache|Empty","pool_bytes":67108864,"eviction":"s3fifo","waiting_queue_depth":8192,'
CORE += '"running_queue_depth":524288,"timeout_ms":30000}'


@pytest.fixture(autouse=True)
def _core(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--native") != "real":
        pytest.skip("needs the real core")
    pytest.importorskip("kvdepot._native")
    pytest.importorskip("vllm")


@dataclass
class Served:
    """A depot, or none yet."""

    socket: Path
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        command = [sys.executable, "-m", "kvdepot", "serve", "--socket", str(self.socket), "--core-json", CORE]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(command, env=environment)
        end_s = time.monotonic() + WAIT_S
        while depot_stats(self.socket) is None:
            assert time.monotonic() < end_s, "the depot does not answer"
            time.sleep(0.02)

    def pause(self) -> None:
        assert self.process is not None
        pause(self.process.pid)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "depot.sock")
    yield made
    if made.process is not None:
        made.kill()


class Side:
    """vLLM's manager of tiers, with ours, as its scheduler drives it."""

    def __init__(self, served: Served, **keys: Any) -> None:
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
        from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

        from kvdepot.engines.offloading import KVDepotTier

        name = f"kvdepot-test-{os.getpid()}-{time.monotonic_ns()}"
        region = SharedOffloadRegion(name, CHUNKS, None, CHUNK_BYTES, CHUNK_BYTES)
        primary = CPUPrimaryTierOffloadingManager(CHUNKS, region)
        self.view = primary.get_kv_memoryview()
        config = SimpleNamespace(
            engine_id="e", model=SimpleNamespace(name="m"), cache=SimpleNamespace(blocks_per_chunk=1)
        )
        depot = {"socket": str(served.socket), "pipeline": "Cache|Empty", "pool_gb": 0.25, "start_depot": False}
        depot |= {"call_timeout_ms": CALL_MS, "timeout_ms": WAIT_S * 1000}
        self.tier = KVDepotTier(SimpleNamespace(config=config), self.view, "KVDepotTier", None, **{**depot, **keys})
        self.manager = TieringOffloadingManager(primary, [self.tier])

    def request(self, name: str, keys: list[Any] = []) -> Any:  # noqa: B006 - not changed
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(name)
        for number, key in enumerate(keys):
            context.set_offload_key_position(key, CHUNK_TOKENS * (number + 1))
        self.manager.on_new_request(context)
        return context

    def step(self, preempted: tuple[str, ...] = (), new: tuple[str, ...] = ()) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext(new, preempted))

    def store(self, context: Any, keys: list[Any]) -> None:
        """What the engine computes: each chunk has the first byte of its key all over."""
        output = self.manager.prepare_store(keys, context)
        for key, chunk in zip(output.keys_to_store, output.store_spec.block_ids.tolist(), strict=True):
            self.view[chunk : chunk + 1].cast("B")[:] = bytes([key[0]]) * CHUNK_BYTES
        self.manager.complete_store(keys, context)

    def settle(self) -> None:
        self.until(lambda: not self.manager.has_pending_work())

    def until(self, done: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < end_s, "has not come about"
            self.step()
            time.sleep(0.001)

    def found(self, context: Any, keys: list[Any]) -> list[str]:
        """What a request finds after as many steps as it takes."""
        answers: list[str] = []

        def asked() -> bool:
            answers[:] = [self.manager.lookup(key, context).name for key in keys]
            return not {"RETRY", "HIT_PENDING"} & set(answers)

        self.until(asked)
        return answers

    def asked(self, context: Any, keys: list[Any]) -> list[str]:
        """What a request finds when all lookups are answered; loads may be pending."""
        answers: list[str] = []

        def answered() -> bool:
            answers[:] = [self.manager.lookup(key, context).name for key in keys]
            return "RETRY" not in answers

        self.until(answered)
        return answers

    def bytes_of(self, context: Any, keys: list[Any]) -> list[set[int]]:
        spec = self.manager.prepare_load(keys, context)
        return [set(bytes(self.view[chunk : chunk + 1].cast("B"))) for chunk in spec.block_ids.tolist()]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, served: Served) -> Iterator[Callable[..., Side]]:
    from kvdepot.engines.offloading import answers, room, tier

    monkeypatch.setattr(answers, "STALE_S", FOREVER_S)
    monkeypatch.setattr(room, "RESET_S", 2.0 * WAIT_S)
    monkeypatch.setattr(room, "TASK_S", float(WAIT_S))
    monkeypatch.setattr(tier, "calling_engine", lambda: None)
    monkeypatch.setattr(tier, "refuse_unsupported", lambda *_: None)
    monkeypatch.setattr(tier, "chunk_facts", lambda *_: {"test": 1})
    monkeypatch.setattr(tier, "windowed_groups", lambda _: frozenset({WINDOWS}))
    made: list[Side] = []

    def make_side(**keys: Any) -> Side:
        side = Side(served, **keys)
        made.append(side)
        if served.process is not None:
            # The start waits half a second for a depot, which a busy machine may exceed.
            side.until(lambda: bool(side.tier._room.attached))
        return side

    yield make_side
    for side in made:
        side.manager.shutdown()


def keys(*first: int, group: int = FULL) -> list[Any]:
    from vllm.v1.kv_offload.base import make_offload_key

    return [make_offload_key(bytes([one]) * 32, group) for one in first]


def hit(side: Side, context: Any, *groups: list[Any]) -> int | None:
    """What vLLM's scheduler finds in a step for a request of full chunks, in chunks; ``None``: later.

    The second group, if there is one, has windows of two chunks.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

    windows = [None, 2][: len(groups)]
    configs = [
        SimpleNamespace(
            tokens_per_chunk=CHUNK_TOKENS,
            sliding_window_size_in_chunks=window,
            load_window_size_in_chunks=lambda _, window=window: window,
            is_eagle_group=False,
        )
        for window in windows
    ]
    scheduler: Any = OffloadingConnectorScheduler.__new__(OffloadingConnectorScheduler)
    scheduler.config = SimpleNamespace(kv_group_configs=configs)
    scheduler.manager = side.manager
    scheduler._events_tracker = SimpleNamespace(record_lookup=lambda *_: None)
    scheduler._sliding_window_groups = tuple(range(1, len(groups)))
    scheduler._lookup_groups = tuple(range(len(groups)))
    scheduler._mamba_align_size = scheduler._chunks_being_loaded = None
    # vLLM always computes one token.
    request = SimpleNamespace(num_tokens=CHUNK_TOKENS * len(groups[0]) + 1, request_id=context.req_id)
    status = SimpleNamespace(
        req=request,
        req_context=context,
        num_locally_computed_tokens=0,
        max_load_tokens=None,
        group_states=[SimpleNamespace(offload_keys=group) for group in groups],
    )
    tokens = scheduler._lookup_complete_chunks(status)
    return None if tokens is None else tokens // CHUNK_TOKENS


def hit_at_last(side: Side, context: Any, *groups: list[Any]) -> int:
    """What ``hit`` finds after as many steps as it takes."""
    found: list[int] = []

    def looked_up() -> bool:
        found[:] = [one for one in [hit(side, context, *groups)] if one is not None]
        return bool(found)

    side.until(looked_up)
    return found[0]


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for all of its lookups."""
    from kvdepot.engines.offloading import tier

    monkeypatch.setattr(tier, "STEP_WAIT_S", WAIT_S)


def test_chunks_of_one_engine_are_found_by_another(served: Served, make: Callable[..., Side]) -> None:
    served.start()
    one, two = make(), make()
    stored, others = keys(1, 2, 3), keys(9)
    one.store(one.request("a"), stored)
    one.settle()
    context = two.request("b", [*stored, *others])
    two.manager.lookup(stored[0], context)
    assert two.found(context, [*stored, *others]) == ["HIT", "HIT", "HIT", "MISS"]
    assert two.bytes_of(context, stored) == [{1}, {2}, {3}]
    assert two.tier.counts() == {"asked": 4, "hit": 3, "loaded": 3, "lookups": 1}
    assert one.tier.counts() == {"dumped": 3}


def test_vllm_gets_its_memory_back(served: Served, make: Callable[..., Side]) -> None:
    """Nothing holds vLLM's view after the tier's end: it could not be released."""
    served.start()
    side = make()
    side.store(side.request("a"), keys(1, 2))
    side.manager.shutdown()
    with pytest.raises(ValueError, match="released"):
        side.view.tobytes()
    side.manager.shutdown = lambda: None
    assert side.tier.counts() == {"dumped": 2}


def test_a_chunk_that_cannot_be_loaded_is_a_miss_for_its_request(
    served: Served, make: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came beside it is kept; it is not tried for ever."""
    served.start()
    one, two = make(), make()
    stored = keys(1, 2, 3)
    one.store(one.request("a"), [stored[0], stored[2]])
    one.settle()
    # As if it went after the lookup.
    look = two.tier._room.lookup
    monkeypatch.setattr(two.tier._asker, "_look", lambda asked: look(asked) | True)
    context = two.request("b", stored)
    assert two.found(context, stored) == ["HIT", "MISS", "HIT"]
    assert two.bytes_of(context, [stored[0], stored[2]]) == [{1}, {3}]
    assert two.tier.counts()["load_not_found"] == 1


@pytest.mark.parametrize("trouble", ["absent", "hung", "killed"])
def test_a_step_does_not_wait_for_a_depot_that_does_not_answer(
    served: Served, make: Callable[..., Side], trouble: str
) -> None:
    if trouble != "absent":
        served.start()
    side = make(attach_timeout_ms=100)
    if trouble != "absent":
        side.until(lambda: bool(side.tier._room.attached))
    side.store(side.request("a"), keys(1))
    side.settle()
    if trouble != "absent":
        assert side.tier.counts() == {"dumped": 1}
        served.pause() if trouble == "hung" else served.kill()
    for number in range(PROBES):
        wanted = keys(*range(100, 200))
        context = side.request(f"r{number}", wanted)
        assert {side.manager.lookup(key, context).name for key in wanted} <= {"MISS", "RETRY"}
        side.step()
        side.manager.on_request_finished(context)
    if trouble == "hung":
        # All steps have ended, and no lookup has: no step has waited for one.
        counts = side.tier.counts()
        assert "asked" not in counts
        assert not any(name.startswith("miss_") for name in counts)
    side.tier._late_s = 0.01
    last = side.request("last", keys(50))
    assert side.found(last, keys(50)) == ["MISS"]
    if trouble == "hung":
        assert side.tier.counts()["miss_late"] == 1
        served.kill()
    context = side.request("store")
    side.store(context, keys(60))
    side.settle()
    counts = side.tier.counts()
    assert sum(count for name, count in counts.items() if name.startswith("miss_")) > 0
    assert sum(count for name, count in counts.items() if name.startswith("dump_")) > 0


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the tier logs. pytest's own capture gets each line twice or not at all, depending on earlier tests."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("vllm.kvdepot"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_depot_that_comes_later_is_used(served: Served, make: Callable[..., Side], said: list[str]) -> None:
    """Attached, lost and back are said once each."""
    side = make(attach_timeout_ms=100)
    assert side.found(side.request("a"), keys(1)) == ["MISS"]
    served.start()
    side.until(lambda: bool(side.tier._room.attached))
    side.store(side.request("b"), keys(2))
    side.settle()
    served.kill()
    side.until(lambda: not side.tier._room.attached)
    for _ in range(3):
        side.step()
    served.start()
    side.until(lambda: bool(side.tier._room.attached))
    for _ in range(3):
        side.step()
    for text in ("attached to the depot", "the depot was lost", "the depot is back"):
        assert sum(text in line for line in said) == 1, said


def test_a_reset_waits_for_copies_and_goes_apart(served: Served, make: Callable[..., Side]) -> None:
    served.start()
    side = make()
    running = side.request("running")
    side.store(running, keys(1, 2))
    side.manager.reset_cache()
    assert not side.manager.has_pending_work()
    assert side.tier.counts() == {"dumped": 2, "resets": 1}
    # What ran at the reset may have KV of before in it; what begins after it has not.
    side.store(running, keys(3))
    begun = side.request("begun")
    side.store(begun, keys(4))
    side.settle()
    side.manager.primary_tier.reset_cache()
    asked = keys(1, 2, 3, 4)
    assert side.found(side.request("later", asked), asked) == ["MISS", "MISS", "MISS", "HIT"]
    other = make()
    assert other.found(other.request("other", asked), asked) == ["HIT", "HIT", "MISS", "MISS"]


def test_requests_that_waited_during_a_reset_are_stored(served: Served, make: Callable[..., Side]) -> None:
    """vLLM tells of a request when it is added. A pause may have a long queue, which is computed after the reset."""
    served.start()
    side = make()
    side.tier._windowed = frozenset()
    begun, waiting, promoted = (side.request(name, keys(7)) for name in ("begun", "waiting", "promoted"))
    side.step(new=("begun",))
    side.store(side.request("other"), keys(7))
    side.settle()
    side.manager.primary_tier.reset_cache()
    assert side.found(promoted, keys(7)) == ["HIT"]
    side.manager.reset_cache()
    side.step(new=("waiting", "promoted"))
    for context, number in ((begun, 1), (waiting, 2), (promoted, 3)):
        side.store(context, keys(number))
    side.settle()
    assert side.tier.counts()["dump_before_reset"] == 2
    side.manager.primary_tier.reset_cache()
    asked = keys(1, 2, 3)
    assert side.found(side.request("later", asked), asked) == ["MISS", "HIT", "MISS"]
    # At the next reset they have run.
    side.manager.reset_cache()
    side.store(waiting, keys(4))
    assert side.tier.counts()["dump_before_reset"] == 3


def test_no_request_from_before_a_reset_is_stored_if_there_are_windows(
    served: Served, make: Callable[..., Side]
) -> None:
    """vLLM may have loaded its prefix from memory of its own, and offers its blocks again."""
    served.start()
    side = make()
    side.tier._windowed = frozenset({WINDOWS})
    waiting = side.request("waiting")
    side.manager.reset_cache()
    side.store(waiting, keys(1))
    assert side.tier.counts()["dump_before_reset"] == 1


def test_a_reset_may_keep_the_namespace(served: Served, make: Callable[..., Side]) -> None:
    """Nothing is loaded until vLLM has stored a chunk: its workers may still copy to slots of before the reset."""
    served.start()
    side = make(on_reset="keep")
    running = side.request("running")
    side.store(running, keys(1))
    side.manager.reset_cache()
    assert side.found(side.request("early", keys(1)), keys(1)) == ["MISS"]
    assert "loaded" not in side.tier.counts()
    # vLLM offers all chunks of a running request again, also those whose blocks belong to others now.
    side.store(running, keys(2))
    side.settle()
    side.manager.primary_tier.reset_cache()
    side.store(side.request("begun"), keys(3))
    side.settle()
    side.manager.primary_tier.reset_cache()
    assert side.found(side.request("later", keys(1, 2, 3)), keys(1, 2, 3)) == ["HIT", "MISS", "HIT"]
    assert side.tier.counts()["miss_after_reset"] == 1
    assert side.tier.counts()["dump_before_reset"] == 1


def test_later_resets_use_one_namespace(served: Served, make: Callable[..., Side]) -> None:
    """A depot knows 2048 namespaces at most, and a training may reset its engine more often."""
    served.start()
    side = make()
    side.manager.reset_cache()
    first = side.tier._room.namespace_id
    for number in range(3):
        side.store(side.request(f"stored {number}"), keys(1))
        side.settle()
        side.manager.primary_tier.reset_cache()
        assert side.found(side.request(f"warm {number}", keys(1)), keys(1)) == ["HIT"]
        side.manager.reset_cache()
        assert side.tier._room.namespace_id == first
        assert side.found(side.request(f"cold {number}", keys(1)), keys(1)) == ["MISS"]
    assert side.tier.counts()["resets"] == 4


def test_a_hit_is_no_longer_than_vllm_s_memory(served: Served, make: Callable[..., Side]) -> None:
    """One more load would evict the first chunk, whose load would evict the second, and so on."""
    served.start()
    one, two = make(), make()
    wanted = keys(*range(1, CHUNKS + 5))
    for part in (wanted[:CHUNKS], wanted[CHUNKS:]):
        one.store(one.request("a"), part)
        one.settle()
    context = two.request("b", wanted)
    assert two.found(context, wanted) == ["HIT"] * CHUNKS + ["MISS"] * 4
    assert two.bytes_of(context, wanted[:CHUNKS]) == [{number} for number in range(1, CHUNKS + 1)]
    assert two.tier.counts()["loaded"] == CHUNKS


def test_requests_do_not_evict_each_other_for_ever(served: Served, make: Callable[..., Side]) -> None:
    served.start()
    one, two = make(), make()
    wanted = [keys(*range(1, 13)), keys(*range(101, 113))]
    for part in wanted:
        one.store(one.request("stored"), part)
        one.settle()
    contexts = [two.request(name, part) for name, part in zip("ab", wanted, strict=True)]
    for context, part in zip(contexts, wanted, strict=True):
        assert two.found(context, part) == ["HIT"] * 12
    # The second request's chunks have evicted the first one's, which are not loaded again.
    assert set(two.asked(contexts[0], wanted[0])) == {"HIT", "MISS"}
    assert two.asked(contexts[1], wanted[1]) == ["HIT"] * 12
    assert two.tier.counts()["loaded"] == 24
    # A preempted request is looked up anew.
    two.step(preempted=("a",))
    assert two.found(contexts[0], wanted[0]) == ["HIT"] * 12


@pytest.mark.usefixtures("answered")
def test_a_hit_ends_where_vllm_s_memory_is_in_use(served: Served, make: Callable[..., Side]) -> None:
    """What vLLM had no room for is not tried again: it would evict the beginning of the same request."""
    served.start()
    one, two = make(), make()
    wanted = [keys(*range(1, 13)), keys(*range(101, 113))]
    for part in wanted:
        one.store(one.request("stored"), part)
        one.settle()
    first, second = (two.request(name, part) for name, part in zip("ab", wanted, strict=True))
    assert hit(two, first, wanted[0]) is None
    assert hit(two, second, wanted[1]) is None
    two.step()
    two.settle()
    assert hit(two, first, wanted[0]) == 12
    assert two.bytes_of(first, wanted[0]) == [{number} for number in range(1, 13)]
    # The first request's chunks are in use now, and four others are left.
    assert hit_at_last(two, second, wanted[1]) == CHUNKS - 12
    assert two.bytes_of(second, wanted[1][:4]) == [{number} for number in range(101, 105)]
    assert two.tier.counts()["loaded"] == CHUNKS
    two.manager.complete_load(wanted[0], first)
    two.manager.complete_load(wanted[1][:4], second)
    two.step(preempted=("b",))
    assert hit_at_last(two, second, wanted[1]) == 12


@pytest.mark.usefixtures("answered")
def test_a_window_s_load_does_not_evict_what_is_a_hit(served: Served, make: Callable[..., Side]) -> None:
    """vLLM asserts that every chunk of a hit is in its memory."""
    served.start()
    one, two = make(), make()
    full, windows = keys(*range(1, 7)), keys(*range(101, 107), group=WINDOWS)
    one.store(one.request("last window"), windows[5:])
    one.settle()
    # The memory is full, and the first chunk is the one that vLLM evicts next. Two chunks are stored nowhere.
    two.store(two.request("stored"), [*full, *windows[:3], *keys(*range(201, 201 + CHUNKS - 9))])
    two.settle()
    context = two.request("b", full)
    for number, key in enumerate(windows):
        context.set_offload_key_position(key, CHUNK_TOKENS * (number + 1))
    length = hit_at_last(two, context, full, windows)
    assert length == 3
    loaded = [*full[:length], *windows[length - 2 : length]]
    assert two.bytes_of(context, loaded) == [{key[0]} for key in loaded]


def test_a_preempted_request_asks_anew(served: Served, make: Callable[..., Side]) -> None:
    served.start()
    one, two = make(), make()
    context = two.request("a", keys(1))
    assert two.found(context, keys(1)) == ["MISS"]
    one.store(one.request("b"), keys(1))
    one.settle()
    assert two.found(context, keys(1)) == ["MISS"]
    two.step(preempted=("a",))
    assert two.found(context, keys(1)) == ["HIT"]


class Broken:
    """Whatever is done with it fails."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is broken")


def test_nothing_is_raised_into_vllm(
    served: Served, make: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    served.start()
    side = make()
    monkeypatch.setattr(side.tier._room, "_store", Broken())
    context = side.request("a", keys(1, 2))
    assert side.found(context, keys(1, 2)) == ["MISS", "MISS"]
    side.store(context, keys(1, 2))
    side.settle()
    whole = side.tier._room._depot
    monkeypatch.setattr(side.tier._room, "_depot", SimpleNamespace(attached=True, trouble=""))
    side.manager.reset_cache()
    assert side.found(side.request("b"), keys(1)) == ["MISS"]
    counts = side.tier.counts()
    assert counts["dump_error"] == 2
    assert counts["miss_error"] >= 2
    assert counts["miss_off"] == 1
    assert not side.tier._room.attached
    monkeypatch.setattr(side.tier._room, "_depot", whole)
    monkeypatch.setattr(side.tier._room, "_store", SimpleNamespace(close=lambda wait_ms: True))


def test_no_call_of_vllm_s_raises(served: Served, make: Callable[..., Side], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.kv_offload.base import ScheduleEndContext

    served.start()
    side = make()
    with monkeypatch.context() as broken:
        for name in ("_jobs", "_changes"):
            broken.setattr(side.tier, name, Broken())
        broken.setattr(side.tier._room, "_presence", Broken())
        assert list(side.tier.get_finished_jobs()) == []
        assert side.tier.get_stats() is None
        side.tier.on_schedule_end(ScheduleEndContext([], []))
        side.tier.drain_jobs()
    assert side.tier.counts() == {"errors": 4, "resets": 1}
    side.store(side.request("a"), keys(1))
    side.settle()
    assert side.tier.counts()["dumped"] == 1


def test_jobs_are_reported_although_their_requests_are_not_told(
    served: Served, make: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would keep their chunks for ever otherwise."""
    served.start()
    one, two = make(), make()
    one.store(one.request("a"), keys(1))
    one.settle()
    context = two.request("b", keys(1))
    assert two.asked(context, keys(1)) == ["HIT_PENDING"]
    two.step()
    with monkeypatch.context() as broken:
        broken.setattr(two.tier, "_answers", {"b": Broken()})
        two.settle()
    assert two.tier.counts()["errors"] == 1
    two.manager.reset_cache()


def test_metrics_are_those_that_vllm_was_told_of(served: Served, make: Callable[..., Side]) -> None:
    served.start()
    side = make()
    context = side.request("a", keys(1))
    assert side.found(context, keys(1)) == ["MISS"]
    side.store(context, keys(1))
    side.settle()
    served.kill()
    side.until(lambda: not side.tier._room.attached)
    side.store(context, keys(2))
    side.settle()
    stats = side.tier.get_stats()
    definitions = side.tier.build_metric_definitions({})
    assert set(stats.data["data"]) <= set(definitions)
    for name, values in stats.data["data"].items():
        assert all(len(labels) == len(definitions[name].labelnames) for labels in values)
    assert stats.data["data"]["vllm:kvdepot_offload_store_failed_chunks"] == {("no_depot",): 1}
    assert stats.data["data"]["vllm:kvdepot_offload_attached"] == {(): 0}
    assert side.tier.get_stats() is None
