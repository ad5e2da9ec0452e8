"""How long a call may take and how much of the pool it may hold, with stand-ins for depot and clock."""

import logging
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang_parts import IndexerPoolHost, MHATokenToKVPoolHost

from kvdepot.config import load_config
from kvdepot.engines.clearing import Clearing
from kvdepot.engines.counters import Counters
from kvdepot.engines.resets import Resets
from kvdepot.engines.sglang import room
from kvdepot.engines.sglang.pages import Pages
from kvdepot.engines.sglang.room import CALL_S, HELD_PART, KNOWN_S, LOOKUP_PAGES, Room
from kvdepot.task import TaskResult

UNTIL_S = 60.0


class Clock:
    """A clock that only a slow operation moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(room, "time", made)
    return made


class SlowStore:
    """Has every page; each call takes as long as permitted."""

    def __init__(self, clock: Clock, timeout_ms: int) -> None:
        self.clock, self.timeout_ms = clock, timeout_ms
        self.calls: list[str] = []
        self.missing = 0

    def _late(self, call: str) -> None:
        self.calls.append(call)
        self.clock.now_s += self.timeout_ms / 1e3

    def lookup(self, hashes: list[bytes]) -> list[int]:
        self._late("lookup")
        return [1] * len(hashes)

    def lookup_on_prefix(self, hashes: list[bytes]) -> int:
        self._late("lookup_on_prefix")
        return len(hashes) - self.missing

    def dump(self, hashes: list[bytes], addresses: Any, *, keep: Any) -> Any:
        self._late("dump")
        result = TaskResult(np.arange(len(hashes), dtype=np.int64), {"no_space": len(hashes)})
        return SimpleNamespace(wait_done=lambda: True, result=lambda: result)

    load = dump


class Claim:
    """A claim that has what was asked for."""

    def __init__(self, depot: "Depot", pages: int) -> None:
        self.depot, self.pages = depot, pages
        depot.leased_bytes += pages * PAGE_BYTES

    def wait(self, timeout_ms: int) -> tuple[bool, int, int]:
        return True, self.pages, self.pages

    def release(self) -> None:
        self.depot.leased_bytes -= self.pages * PAGE_BYTES
        self.pages = 0


class Depot:
    """Leases whatever is claimed, and reports that all blocks together have ``leased_bytes``."""

    attached, trouble = True, ""

    def __init__(self, clock: Clock, pool_bytes: int) -> None:
        self.clock, self.pool_bytes, self.leased_bytes = clock, pool_bytes, 0
        self.stores: list[SlowStore] = []
        self.asked = self.claims = 0

    def open_namespace(self, facts: Any, *, layout: Any) -> None: ...

    def open(self, *, namespace: Any, cuda_device: int | None, timeout_ms: int) -> SlowStore:
        self.stores.append(SlowStore(self.clock, timeout_ms))
        return self.stores[-1]

    def stats(self) -> dict[str, Any]:
        self.asked += 1
        pool = {"pool_bytes": self.pool_bytes, "pool_leased_bytes": self.leased_bytes}
        return {"depot": pool} if self.pool_bytes else {}

    def claim(self, groups: Any, hashes: list[bytes], *, label: str) -> Claim:
        self.claims += 1
        return Claim(self, len(hashes))


PAGE_BYTES = MHATokenToKVPoolHost().page(0).size
SIDE_BYTES = IndexerPoolHost().page(0).size


def opened(clock: Clock, pool_bytes: int = 0, **options: Any) -> tuple[Room, Depot, Counters]:
    depot = options.pop("depot", None) or Depot(clock, pool_bytes)
    counters = Counters(lambda: logging.getLogger("test"))
    config = load_config({"timeout_ms": options.pop("timeout_ms", 30_000)})
    made = Room(config, counters, lambda _: depot, **options)
    for name, pool in (("kv", MHATokenToKVPoolHost()), ("side", IndexerPoolHost())):
        pages = Pages.of(pool, name)
        assert pages is not None
        made.open(name, pages, {})
    return made, depot, counters


HASHES = [bytes([number]) for number in range(100)]


@pytest.mark.parametrize(("timeout_ms", "most_s"), [(30_000, CALL_S), (500, 0.5)])
def test_a_call_ends_long_before_sglang_gives_its_threads_up(clock: Clock, timeout_ms: int, most_s: float) -> None:
    """SGLang's reset waits 10 s for them and then kills SGLang, and its own patience with a hit may end before ours."""
    made, depot, counters = opened(clock, timeout_ms=timeout_ms)
    assert {store.timeout_ms for store in depot.stores} == {most_s * 1e3}
    until_s = made.until()
    assert until_s == clock.now_s + most_s
    began_s = clock.now_s
    assert made.lookup("kv", HASHES, until_s).all()
    # The rest of a late call is a miss, and the depot is not asked for it.
    assert not made.lookup("side", HASHES, until_s).any()
    assert made.lookup_on_prefix("kv", HASHES, until_s) == 0
    assert made.hold({"kv": 0}, HASHES, until_s) is None
    addresses = np.zeros((len(HASHES), 1), dtype=np.uint64)
    assert not any(made.move("load", "side", HASHES, addresses, until_s))
    assert [store.calls for store in depot.stores] == [["lookup"], []]
    assert counters.snapshot()["too_late"] == 4 * len(HASHES)
    # A dump without space: its second task does not begin after the time has passed.
    assert not any(made.move("dump", "side", HASHES, addresses))
    assert depot.stores[1].calls == ["dump"]
    assert clock.now_s - began_s == 2 * most_s
    assert 2 * CALL_S < 10


def test_a_long_lookup_ends_in_time_between_its_batches(clock: Clock) -> None:
    made, depot, counters = opened(clock)
    hashes = [number.to_bytes(16, "little") for number in range(2 * LOOKUP_PAGES + 1)]
    assert made.lookup_on_prefix("kv", hashes, clock.now_s + 1.5 * CALL_S) == 2 * LOOKUP_PAGES
    assert made.lookup("side", hashes, clock.now_s + CALL_S).tolist() == [True] * LOOKUP_PAGES + [False] * (
        LOOKUP_PAGES + 1
    )
    assert [len(store.calls) for store in depot.stores] == [2, 1]
    assert counters.snapshot()["too_late"] == LOOKUP_PAGES + 2
    # A missing page ends a prefix.
    depot.stores[0].missing = 7
    assert made.lookup_on_prefix("kv", hashes, clock.now_s + 10 * CALL_S) == LOOKUP_PAGES - 7


def test_all_ranks_together_hold_a_part_of_the_pool(clock: Clock) -> None:
    pool_bytes = 32 * PAGE_BYTES * HELD_PART
    for ranks, most in ((1, 32), (4, 8)):
        made, _, counters = opened(clock, pool_bytes, ranks=ranks)
        assert made.hold({"kv": 0}, HASHES, made.until()) == most
        assert counters.snapshot()["not_leased"] == len(HASHES) - most


def test_all_engines_together_hold_a_part_of_the_pool(clock: Clock) -> None:
    """Each engine knows only its own ranks; dumps of all would find no space."""
    first, depot, _ = opened(clock, 32 * PAGE_BYTES * HELD_PART)
    others = [opened(clock, depot=depot) for _ in range(3)]
    # They have asked for the pool's size, and know of no lease yet.
    assert all(other.hold({"kv": 0}, HASHES[:1], other.until(), owner=b"own") == 1 for other, _, _ in others)
    assert first.hold({"kv": 0}, HASHES[:20], first.until()) == 20
    rest = [other.hold({"kv": 0}, HASHES[50:60], other.until()) for other, _, _ in others]
    assert rest == [9, None, None]
    assert depot.leased_bytes == 32 * PAGE_BYTES
    assert [counters.snapshot().get("not_leased", 0) for _, _, counters in others] == [1, 10, 10]
    # What was known limits the next hits without a claim or a question.
    claims, asked = depot.claims, depot.asked
    assert others[2][0].hold({"kv": 0}, HASHES[60:70], UNTIL_S + clock.now_s) is None
    assert (depot.claims, depot.asked) == (claims, asked)
    # It is soon claimed again, since others say nothing when they release.
    first.forget()
    clock.now_s += KNOWN_S
    assert others[2][0].hold({"kv": 0}, HASHES[60:70], UNTIL_S + clock.now_s) == 10


def test_a_depot_that_comes_back_with_a_smaller_pool_is_leased_a_part_of_that(clock: Clock) -> None:
    made, depot, counters = opened(clock, 40 * PAGE_BYTES * HELD_PART)
    assert made.hold({"kv": 0}, HASHES[:30], made.until(), owner=b"a") == 30
    made.let_go(b"a")
    depot.pool_bytes = 8 * PAGE_BYTES * HELD_PART
    assert made.hold({"kv": 0}, HASHES[:30], made.until(), owner=b"a") == 8
    assert depot.leased_bytes == 8 * PAGE_BYTES
    assert counters.snapshot()["not_leased"] == 22
    made.let_go(b"a")
    depot.pool_bytes = 40 * PAGE_BYTES * HELD_PART
    assert made.hold({"kv": 0}, HASHES[:6], made.until(), owner=b"a") == 6
    assert made.hold({"kv": 0}, HASHES[:30], made.until(), owner=b"b") == 30


def test_a_hit_of_several_pools_has_no_more_room_than_others(clock: Clock) -> None:
    made, _, _ = opened(clock, HELD_PART * (10 * PAGE_BYTES + 10 * SIDE_BYTES))
    assert made.hold({"kv": 0, "side": 0}, HASHES, made.until()) == 10
    assert made.hold({"kv": 0, "side": 0}, HASHES, made.until()) is None
    # A window takes only its own pages.
    made, _, _ = opened(clock, HELD_PART * (10 * PAGE_BYTES + 2 * SIDE_BYTES))
    assert made.hold({"kv": 0, "side": 2}, HASHES, made.until()) == 10


def test_a_pool_that_was_not_told_is_asked_for_again(clock: Clock) -> None:
    made, depot, _ = opened(clock)
    assert made.hold({"kv": 0}, HASHES[:2], made.until()) == 2
    assert made.hold({"kv": 0}, HASHES[2:4], made.until()) is None
    depot.pool_bytes = HELD_PART * 12 * PAGE_BYTES
    assert made.hold({"kv": 0}, HASHES[4:], made.until()) == 10


class Resetting:
    """A depot that confirms a reset on command."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.threads: list[str] = []

    def send(self) -> bool:
        self.threads.append(threading.current_thread().name)
        self.begun.set()
        return self.may_end.wait(UNTIL_S)


def test_a_reset_blocks_no_thread_of_sglang() -> None:
    resets, depot = Resets(), Resetting()
    clearing = Clearing(resets, depot.send)
    try:
        assert clearing.settled()
        assert not depot.threads
        resets.clear()
        assert not clearing.confirmed(0)
        assert depot.begun.wait(UNTIL_S)
        assert not clearing.settled()
        depot.may_end.set()
        assert clearing.confirmed(UNTIL_S)
        assert clearing.settled()
        assert set(depot.threads) == {"kvdepot-clear"}
    finally:
        depot.may_end.set()
        clearing.close(UNTIL_S)


def test_a_reset_that_fails_is_sent_again() -> None:
    resets, answers = Resets(), [False, RuntimeError("a panic"), True]

    def send() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    clearing = Clearing(resets, send)
    resets.clear()
    assert clearing.confirmed(UNTIL_S)
    assert not answers
    # A dump that was in flight at a clear, and ended after it.
    generation = resets.generation
    assert resets.begin(generation)
    resets.clear()
    answers += [True, True]
    assert not clearing.confirmed(0)
    assert not resets.end(generation)
    assert clearing.confirmed(UNTIL_S)
    clearing.close(UNTIL_S)
    clearing.close(UNTIL_S)
    assert not clearing._thread or not clearing._thread.is_alive()
