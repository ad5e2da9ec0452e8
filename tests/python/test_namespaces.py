"""Namespaces without stores: opened from facts or a description, claimed, reset and followed."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvdepot

WAIT_MS = 60_000
CONFIG = {"pipeline": "Cache", "pool_gb": 1 / 128, "log_level": "warn"}
HASHES = [b"%016d" % number for number in range(4)]
FACTS = {"model": "m", "rank": 0}


@pytest.fixture
def depot() -> Iterator[kvdepot.Depot]:
    with kvdepot.attach(CONFIG) as depot:
        yield depot


def dump(store: kvdepot.Store, hashes: list[bytes]) -> None:
    store.dump(hashes, [[np.ones(64, dtype=np.uint8)]] * len(hashes)).wait().raise_for_failures()


def test_facts_and_description_name_the_same_namespace(depot: kvdepot.Depot) -> None:
    layout = kvdepot.BlockLayout.of_shards([[64], [64], [32, 32]])
    first = depot.open_namespace(FACTS, layout=layout)
    again = depot.open_namespace(first.description)
    assert (again.id, again.description, again.layout) == (first.id, first.description, layout)
    assert json.loads(first.description)["facts"] == FACTS
    assert depot.open_namespace(dict(reversed(FACTS.items())), layout=layout).id == first.id
    assert depot.open_namespace(FACTS, layout=[64]).id != first.id
    with pytest.raises(kvdepot.ConfigError, match="layout"):
        depot.open_namespace(FACTS)
    with pytest.raises(kvdepot.CorruptError, match="not a namespace description"):
        depot.open_namespace("no description")


def test_a_namespace_is_claimed_and_reset_as_its_stores_are(depot: kvdepot.Depot) -> None:
    store = depot.open(layout=[64], namespace=FACTS)
    dump(store, HASHES[:3])
    namespace = depot.open_namespace(store.namespace.description)
    assert namespace.id == store.namespace_id
    for groups in ([namespace], [kvdepot.Group([namespace, store])]):
        with depot.claim(groups, HASHES) as claim:
            assert claim.openings == 1
            settled, units, _ = claim.wait(WAIT_MS)
            assert (settled, units) == (True, 3)
    depot.reset([namespace])
    assert store.lookup_on_prefix(HASHES) == 0


def test_stores_come_and_go_while_their_namespace_stays_open(
    depot: kvdepot.Depot, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    native = depot._native

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def close_namespace(self, namespace: Any) -> None:
            ended.append(namespace.canonical)
            native.close_namespace(namespace)

    monkeypatch.setattr(depot, "_native", Watched())
    namespace = depot.open_namespace(FACTS, layout=[64])
    for hashes in (HASHES[:2], HASHES):
        with depot.open(namespace=namespace, timeout_ms=WAIT_MS) as store:
            assert store.namespace is namespace
            dump(store, hashes)
    assert not ended
    owned = depot.open(namespace=FACTS, layout=[64])
    namespace.close()
    assert not ended, "the store's own is left"
    assert owned.lookup_on_prefix(HASHES) == 4
    assert owned.close(0)
    assert ended == [namespace.description]
    namespace.close()
    owned.close()
    assert len(ended) == 1


def test_an_unsettled_claim_takes_what_has_come(depot: kvdepot.Depot) -> None:
    store = depot.open(layout=[64], namespace=FACTS)
    dump(store, HASHES[:1])
    for ends in ("settle", "decline"):
        with depot.claim([store], HASHES) as claim:
            assert getattr(claim, ends)() == kvdepot.Hit(settled=True, units=1, units_from_tier=0)
            assert claim.poll().settled
            assert claim.arriving() is None or claim.arriving().units == 1  # type: ignore[union-attr]


def test_a_follower_tells_what_every_rank_of_a_group_has(depot: kvdepot.Depot) -> None:
    ranks = [depot.open(layout=[64], namespace={"rank": rank}) for rank in range(2)]
    dump(ranks[0], HASHES)
    dump(ranks[1], HASHES[1:3])
    with depot.follow([ranks]) as follower:
        assert taken(follower) == {("pool", True, HASHES[1]), ("pool", True, HASHES[2])}
        follower.follow([[ranks[0].namespace], [ranks[1]]])
        told = taken(follower, groups=True)
        assert {(0, "pool", False, name) for name in HASHES[1:3]} <= told
        assert {(0, "pool", True, name) for name in HASHES} <= told
        assert {(1, "pool", True, name) for name in HASHES[1:3]} <= told
        assert follower.namespace_ids == []
    with depot.follow() as every:
        taken(every)
        assert set(every.namespace_ids) == {rank.namespace_id for rank in ranks}


def taken(follower: kvdepot.Follower, *, groups: bool = False) -> set[tuple[object, ...]]:
    """Returns what is told until the follower is in step."""
    told: set[tuple[object, ...]] = set()
    while not follower.in_step or not told:
        for group, place, stored, hashes in follower.take():
            told |= {(group, place, stored, name) if groups else (place, stored, name) for name in hashes}
    return told


def test_a_hash_of_any_length_has_sixteen_bytes() -> None:
    assert kvdepot.block_hash(HASHES[0]) == HASHES[0]
    assert len(kvdepot.block_hash(b"short")) == len(kvdepot.block_hash(b"l" * 64)) == 16
    with pytest.raises(kvdepot.ConfigError):
        kvdepot.block_hash(b"")


def test_the_core_s_errors_are_the_public_ones() -> None:
    from kvdepot import _native, errors

    for name in errors.__all__:
        if name.endswith("Error"):
            assert getattr(errors, name) is getattr(_native, name) is getattr(kvdepot, name)
