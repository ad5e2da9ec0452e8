"""Depots over pool servers that speak InfiniStore's protocol: InfiniStore's own, and ours by that protocol only."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tools.wire.depot import Depot
from tools.wire.servers import KINDS, STANDIN, Server, standin_verbs

MIB = 1 << 20
BLOCKS = 48
# Each wait has a limit of its own.
pytestmark = pytest.mark.timeout(600)

NewDepot = Callable[..., Depot]


@pytest.fixture(params=KINDS)
def pool(request: pytest.FixtureRequest) -> Iterator[Server]:
    """An empty server of each kind, which must be alive after the test."""
    if request.param == "infinistore" and standin_verbs() is None:
        pytest.skip(f"InfiniStore's server needs a stand-in for libibverbs, named by {STANDIN}")
    with Server(request.param) as server:
        yield server
        assert server.alive, f"the server died\n{server.tail()}"
        assert server.answers(), f"the server does not answer\n{server.tail()}"


@pytest.fixture
def new_depot(pool: Server) -> Iterator[NewDepot]:
    """Starts depots, each in its own process, over the server."""
    with ExitStack() as stack:

        def start(**settings: object) -> Depot:
            return stack.enter_context(Depot([pool], **{"remote_protocol": "infinistore", **settings}))

        yield start


@pytest.mark.parametrize("protocol", ["infinistore", "auto"])
def test_what_one_depot_dumped_another_one_loads(new_depot: NewDepot, pool: Server, protocol: str) -> None:
    producer, consumer = (new_depot(remote_protocol=protocol) for _ in range(2))
    assert producer.dump(range(BLOCKS))
    if (pool.kind, protocol) != ("kvdepot", "auto"):
        assert pool.kvmap_len() == 2 * BLOCKS, "each block, and that it is whole"
    assert consumer.lookup(range(BLOCKS + 8)) == [True] * BLOCKS + [False] * 8
    assert consumer.load(range(BLOCKS + 8)) == ["whole"] * BLOCKS + ["missing"] * 8
    stats = consumer.stats()
    assert stats["fetch_blocks"] == BLOCKS
    assert stats["load_blocks_missed"] == 8
    assert consumer.servers()[0]["failures"] == 0


def test_blocks_of_many_sizes(new_depot: NewDepot) -> None:
    for number, layer_bytes in enumerate([512, 5_000, 1 * MIB, 3 * MIB + 4_096]):
        blocks = range(number * 100, number * 100 + 4)
        producer, consumer = (new_depot(layer_bytes=layer_bytes) for _ in range(2))
        assert producer.dump(blocks)
        assert consumer.load(blocks) == ["whole"] * 4, layer_bytes


def test_blocks_are_whole_or_missing_while_others_write_them(new_depot: NewDepot) -> None:
    """P1: InfiniStore's server shows a key before the value has arrived, and crashes on clients that request it
    then."""
    one, two, reader = (new_depot() for _ in range(3))
    for turn in range(6):
        blocks = range(turn * BLOCKS, (turn + 1) * BLOCKS)
        for writer in (one, two):
            writer.send("dump", list(blocks))
        for _ in range(4):
            assert "wrong" not in reader.load(blocks)
        assert all(writer.receive("dump") for writer in (one, two))
        reader.until(lambda depot, blocks=blocks: depot.load(blocks) == ["whole"] * BLOCKS)


def test_a_reset_holds_for_those_who_come_later(new_depot: NewDepot) -> None:
    producer = new_depot()
    assert producer.dump(range(BLOCKS))
    producer.reset()
    assert producer.dump(range(BLOCKS, BLOCKS + 4))
    later = new_depot()
    assert later.load(range(BLOCKS + 4)) == ["missing"] * BLOCKS + ["whole"] * 4


def test_a_killed_server_is_misses_and_is_used_again(new_depot: NewDepot, pool: Server) -> None:
    """P2, P4."""
    producer, consumer = new_depot(), new_depot()
    assert producer.dump(range(BLOCKS))
    assert consumer.load(range(4)) == ["whole"] * 4
    pool.kill()
    assert consumer.load(range(BLOCKS)) == ["whole"] * 4 + ["missing"] * (BLOCKS - 4), "four are in its own pool"
    for depot in (producer, consumer):
        depot.until(lambda depot: not depot.servers()[0]["up"])
        assert depot.servers()[0]["failures"] > 0
    assert producer.dump(range(1000, 1004)), "dropped by the tier, kept in the pool"
    assert producer.stats()["write_blocks_dropped"] == 4
    pool.restart()
    for depot in (producer, consumer):
        depot.until(lambda depot: depot.servers()[0]["up"])
    # Its pool is empty, and the depot does not assume anything else.
    assert consumer.load(range(4, BLOCKS)) == ["missing"] * (BLOCKS - 4)
    assert producer.dump(range(2000, 2000 + BLOCKS))
    assert consumer.load(range(2000, 2000 + BLOCKS)) == ["whole"] * BLOCKS
    for depot in (producer, consumer):
        depot.until(holds_nothing)


def holds_nothing(depot: Depot) -> bool:
    stats = depot.stats()
    return not any(stats[f"pool_{what}_bytes"] for what in ("filling", "fetching", "dirty", "leased"))


def test_what_the_server_evicted_is_a_miss(new_depot: NewDepot, pool: Server) -> None:
    """Half as much again as it holds: it evicts blocks and the records of their completeness one by one."""
    layer_bytes, at_once = MIB, 16
    count = int(1.5 * pool.pool_gib * (1 << 30)) // (4 * layer_bytes)
    producer, consumer = (new_depot(layer_bytes=layer_bytes) for _ in range(2))
    for first in range(0, count, at_once):
        assert producer.dump(range(first, first + at_once))
    states = [consumer.load(range(first, first + at_once)) for first in range(0, count, at_once)]
    flat = [state for some in states for state in some]
    assert "wrong" not in flat
    assert flat[-at_once:] == ["whole"] * at_once
    assert flat[:at_once] == ["missing"] * at_once
    assert consumer.servers()[0]["failures"] == 0, "a miss costs no connection"
