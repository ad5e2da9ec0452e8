"""The connector's KV events: what vLLM's publisher gets of the depot, without vLLM."""

import importlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvdepot
from kvdepot.engines.vllm import events as module
from kvdepot.engines.vllm.adapters import block_keys, with_adapter
from kvdepot.engines.vllm.connector import KVDepotConnector
from kvdepot.engines.vllm.events import BLOCKS_PER_STEP, DepotEvents, external_hashes, wants_events
from kvdepot.engines.vllm.requests import RequestState
from kvdepot.publish.terms import medium_of

vllm_hashes = importlib.import_module("vllm.v1.core.kv_cache_utils")

HANG_S = 60.0
BYTES = 4096
CONFIG = {"pipeline": "Cache", "pool_gb": 1 / 64, "timeout_ms": 60_000}
GEOMETRY: Any = SimpleNamespace(groups=[SimpleNamespace(index=0), SimpleNamespace(index=3)])
DIGESTS = [bytes(range(n, n + 32)) for n in range(4)]


class Scripted:
    """A follower with changes of its own."""

    def __init__(self) -> None:
        self.changes: list[tuple[int, str, bool, list[bytes]]] = []
        self.asked: list[int] = []
        self.followed: list[Any] = []
        self.closed = False

    def take(self, most: int) -> list[tuple[int, str, bool, list[bytes]]]:
        self.asked.append(most)
        taken, self.changes = self.changes, []
        return taken

    def follow(self, groups: Any) -> None:
        self.followed.append(groups)

    def close(self) -> None:
        self.closed = True


class ScriptedDepot:
    def __init__(self) -> None:
        self.follower = Scripted()

    def follow(self, groups: Any) -> Scripted:
        self.follower.follow(groups)
        return self.follower


def group(*ranks: Any) -> kvdepot.Group:
    return kvdepot.Group(ranks)


@pytest.fixture
def depot() -> Iterator[kvdepot.Depot]:
    with kvdepot.attach(CONFIG) as made:
        yield made


def namespace(depot: kvdepot.Depot, name: str) -> kvdepot.Namespace:
    return depot.open_namespace({"model": name}, layout=[BYTES])


def dump(depot: kvdepot.Depot, into: kvdepot.Namespace, keys: list[bytes]) -> None:
    store = depot.open(namespace=into)
    page = np.zeros(BYTES, dtype=np.uint8)
    bases, strides = np.array([page.ctypes.data], dtype=np.uint64), np.array([BYTES], dtype=np.int64)
    store.register_pages(bases, strides, 1, page)
    for key in keys:
        store.dump_pages([key], [0]).wait().raise_for_failures()
    assert store.close(60_000)


def known_by(events: DepotEvents, groups: Any, known: set[Any], is_it: Callable[[set[Any]], bool]) -> list[Any]:
    """Applies events to what is known, until it is as wished. Returns the events."""
    seen: list[Any] = []
    deadline = time.monotonic() + HANG_S
    while not is_it(known):
        assert time.monotonic() < deadline, known
        for event in events.take(groups):
            seen.append(event)
            for one in event.block_hashes:
                entry = (event.group_idx, one)
                stored = type(event).__name__ == "BlockStored"
                assert (entry in known) != stored, "told twice"
                (known.add if stored else known.discard)(entry)
        time.sleep(0.001)
    return seen


def numbers(digests: list[bytes], index: int = 0) -> set[Any]:
    return {(index, int.from_bytes(one[-8:], "big")) for one in digests}


def test_blocks_of_all_ranks_are_told_by_vllm_s_numbers(depot: kvdepot.Depot) -> None:
    first, second, other = (namespace(depot, name) for name in ("rank 0", "rank 1", "other group"))
    events = DepotEvents(depot, GEOMETRY)
    assert events.take(()) == []
    groups, known = [group(first, second), group(other)], set[Any]()
    keys = block_keys(DIGESTS)
    dump(depot, first, keys[:3])
    dump(depot, second, keys[1:])
    dump(depot, other, keys[:1])
    seen = known_by(events, groups, known, lambda known: known == numbers(DIGESTS[1:3]) | numbers(DIGESTS[:1], 3))
    assert {(event.medium, event.parent_block_hash, tuple(event.token_ids)) for event in seen} == {("CPU", None, ())}
    assert {(event.locality, event.ownership) for event in seen} == {("LOCAL", "kvdepot/pool")}
    depot.reset([second])
    known_by(events, groups, known, lambda known: known == numbers(DIGESTS[:1], 3))
    dump(depot, second, keys[:1])
    known_by(events, groups, known, lambda known: known == numbers(DIGESTS[:1]) | numbers(DIGESTS[:1], 3))
    # Other namespaces, as after an update of the weights.
    later = namespace(depot, "later")
    dump(depot, later, keys[3:])
    others = [group(later), group(other)]
    known_by(events, others, known, lambda known: known == numbers(DIGESTS[3:]) | numbers(DIGESTS[:1], 3))
    known_by(events, [], known, lambda known: not known)
    events.close()


def test_keys_end_with_the_bytes_that_name_a_block_in_events() -> None:
    assert block_keys(DIGESTS) == [digest[-16:] for digest in DIGESTS]
    adapted = with_adapter(DIGESTS, b"adapter")
    assert [key[-8:] for key in adapted] == [digest[-8:] for digest in DIGESTS]
    assert {len(key) for key in adapted} == {16}
    assert not set(adapted) & {*block_keys(DIGESTS), *with_adapter(DIGESTS, b"another")}
    for keys in (block_keys(DIGESTS), adapted):
        assert (
            external_hashes(keys)
            == external_hashes(DIGESTS)
            == list(map(vllm_hashes.maybe_convert_block_hash, DIGESTS))
        )
        assert [kvdepot.block_hash(key) for key in keys] == keys, "the core takes 16 bytes as they are"


@pytest.mark.parametrize("adapter", [b"", b"adapter"])
def test_hashes_that_a_scheduler_computes_again_get_keys_of_their_own(adapter: bytes) -> None:
    """As many other tokens must not be stored or loaded under the keys of the first ones (P1)."""
    state = RequestState(SimpleNamespace(block_hashes=DIGESTS[:2]), adapter=adapter)
    keys_of = partial(with_adapter, adapter=adapter) if adapter else block_keys
    assert state.hashes == keys_of(DIGESTS[:2])
    state.request.block_hashes = DIGESTS[:3]
    assert state.hashes == keys_of(DIGESTS[:3])
    others = [bytes(reversed(digest)) for digest in DIGESTS]
    for count in (3, 4, 2, 1, 0):
        state.request.block_hashes = others[:count]
        assert state.hashes == keys_of(others[:count]), count


def test_whole_hashes_are_told_where_vllm_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_hashes, "maybe_convert_block_hash", lambda block_hash: block_hash)
    assert external_hashes(block_keys(DIGESTS)) == block_keys(DIGESTS)


def test_places_in_vllm_s_words() -> None:
    assert medium_of("pool") == ("CPU", "LOCAL")
    assert {medium_of(name) for name in ("posix", "Slab", "dax")} == {("STORAGE", "LOCAL")}
    assert medium_of("mooncake") == ("CPU", "REMOTE")
    assert (medium_of("Remote"), medium_of("object")) == (("CPU", "REMOTE"), ("STORAGE", "REMOTE"))


def test_a_step_tells_a_bounded_number_of_blocks() -> None:
    depot = ScriptedDepot()
    events = DepotEvents(depot, GEOMETRY)  # type: ignore[arg-type]
    groups = [group("rank"), group("rank of 3")]
    depot.follower.changes = [
        (1, "posix", True, [b"a" * 16, b"b" * 16]),
        (0, "remote", False, [b"c" * 16]),
        (0, "tier 9", True, [b"d" * 16]),
    ]
    found = events.take(groups)
    assert depot.follower.asked == [BLOCKS_PER_STEP]
    assert [(event.medium, event.group_idx, len(event.block_hashes)) for event in found] == [
        ("STORAGE", 3, 2),
        ("CPU", 0, 1),
        ("STORAGE", 0, 1),
    ]
    assert (events.take(groups), len(depot.follower.followed)) == ([], 1), "the same groups are followed on"


def test_a_failure_ends_the_events_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    depot = ScriptedDepot()
    events = DepotEvents(depot, GEOMETRY)  # type: ignore[arg-type]
    monkeypatch.setattr(module.logger, "propagate", True)

    def fails(most: int) -> Any:
        raise OSError("a planted failure")

    monkeypatch.setattr(depot.follower, "take", fails)
    with caplog.at_level(logging.ERROR):
        assert [events.take([group("rank")]) for _ in range(3)] == [[], [], []]
    assert [record.getMessage() for record in caplog.records] == [
        "kvdepot: no more KV events, because they failed: a planted failure"
    ]
    assert events._follower is None, "without a reference the follower stops, and the depot records no more for it"
    events.close()


def test_the_connector_tells_events_only_if_the_user_wants_them() -> None:
    wanted = SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=True))
    unwanted = SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=False))
    assert (wants_events(wanted), wants_events(unwanted)) == (True, False)
    assert not wants_events(SimpleNamespace(kv_events_config=None))
    assert not wants_events(SimpleNamespace())
    connector: Any = KVDepotConnector.__new__(KVDepotConnector)
    depot, shape = ScriptedDepot(), SimpleNamespace(groups=GEOMETRY.groups, unsupported="")
    connector._scheduler = SimpleNamespace(namespace_groups=[group("rank")], close=lambda: None)
    connector._vllm_config = unwanted
    connector._tell_events(depot, shape)
    assert connector.take_events() == ()
    connector._vllm_config = wanted
    connector._tell_events(depot, shape)
    depot.follower.changes = [(0, "pool", True, [b"a" * 16])]
    (event,) = connector.take_events()
    assert event.block_hashes == external_hashes([b"a" * 16])
    connector._scheduler.namespace_groups = ()
    assert connector.take_events() == []
    assert depot.follower.followed == [[("rank",)], []]
    connector.shutdown()
    assert depot.follower.closed
    assert connector.take_events() == []
