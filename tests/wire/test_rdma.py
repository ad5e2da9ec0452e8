"""InfiniStore's own client over RDMA, through a stand-in for libibverbs on one host."""

import pytest
from conftest import NewPeer
from values import value

from tools.wire.client import Peer
from tools.wire.servers import Server

KIB, MIB = 1 << 10, 1 << 20
OK = (True, 200)

pytestmark = pytest.mark.rdma


def blocks(prefix: str, count: int, nbytes: int) -> list[tuple[str, int]]:
    return [(f"{prefix}-{i}", i * nbytes) for i in range(count)]


@pytest.mark.parametrize(
    ("count", "nbytes"), [(1, 1), (1, 4 * KIB), (16, 64 * KIB), (3, 100_001), (100, 4 * KIB), (4, 4 * MIB)]
)
def test_blocks_come_back_whole(rdma_peer: Peer, count: int, nbytes: int) -> None:
    sent = value("sent", count * nbytes)
    rdma_peer.register("from", sent)
    rdma_peer.register("to", bytes(count * nbytes))
    named = blocks(f"r{count}-{nbytes}", count, nbytes)
    assert rdma_peer.rdma_write("from", [(named, nbytes)]) == [OK]
    assert rdma_peer.buffer("to") != sent
    assert rdma_peer.rdma_read("to", [(named, nbytes)]) == [OK]
    assert rdma_peer.buffer("to") == sent
    assert rdma_peer.exists(named[-1][0])
    assert rdma_peer.match([key for key, _ in named] + ["none"]) == count - 1
    assert rdma_peer.delete([key for key, _ in named]) == count


def test_a_chain_longer_than_a_chain_of_work_requests(rdma_peer: Peer) -> None:
    count, nbytes = 1000, 1024
    sent = value("sent", count * nbytes)
    rdma_peer.register("from", sent)
    rdma_peer.register("to", bytes(count * nbytes))
    named = blocks("chain", count, nbytes)
    assert rdma_peer.rdma_write("from", [(named, nbytes)]) == [OK]
    assert rdma_peer.rdma_read("to", [(named[::-1], nbytes)]) == [OK]
    assert rdma_peer.buffer("to") == sent


def test_as_many_requests_in_flight_as_the_client_allows(rdma_peer: Peer) -> None:
    """128 requests; a 129th makes the client wait forever, as it wakes its event loop from another thread."""
    count, nbytes = 128, 8 * KIB
    sent = value("sent", count * nbytes)
    rdma_peer.register("from", sent)
    rdma_peer.register("to", bytes(count * nbytes))
    for turn in range(5):
        single = [([block], nbytes) for block in blocks(f"flight-{turn}", count, nbytes)]
        assert rdma_peer.rdma_write("from", single) == [OK] * count
        assert rdma_peer.rdma_read("to", single[::-1]) == [OK] * count
        assert rdma_peer.buffer("to") == sent


def test_rdma_and_tcp_see_the_same_values(rdma_peer: Peer, new_peer: NewPeer) -> None:
    tcp = new_peer()
    rdma_peer.register("buffer", value("one", 50_000))
    assert rdma_peer.rdma_write("buffer", [([("one", 0)], 50_000)]) == [OK]
    assert tcp.get("one") == value("one", 50_000)
    tcp.put("two", value("two", 50_000))
    assert rdma_peer.rdma_read("buffer", [([("two", 0)], 50_000)]) == [OK]
    assert rdma_peer.buffer("buffer") == value("two", 50_000)


def test_a_missing_key_is_told(rdma_peer: Peer) -> None:
    rdma_peer.register("buffer", bytes(4096))
    assert rdma_peer.rdma_read("buffer", [([("none", 0)], 4096)]) == [
        (False, ("InfiniStoreKeyNotFound", "some keys not found"))
    ]
    assert rdma_peer.buffer("buffer") == bytes(4096)


def test_a_block_smaller_than_the_value_is_refused(rdma_peer: Peer) -> None:
    rdma_peer.register("buffer", value("large", 8192))
    assert rdma_peer.rdma_write("buffer", [([("large", 0)], 8192)]) == [OK]
    ((done, error),) = rdma_peer.rdma_read("buffer", [([("large", 0)], 4096)])
    assert not done
    assert "400" in error[1]


def test_a_block_larger_than_the_value_takes_it(rdma_peer: Peer) -> None:
    rdma_peer.register("buffer", value("small", 4096) + bytes(4096))
    assert rdma_peer.rdma_write("buffer", [([("small", 0)], 4096)]) == [OK]
    rdma_peer.call("fill", "buffer", b"\xee" * 8192)
    assert rdma_peer.rdma_read("buffer", [([("small", 0)], 8192)]) == [OK]
    assert rdma_peer.buffer("buffer")[:4096] == value("small", 4096)


@pytest.mark.peer_fault("an error's answer overtakes data's, so a miss is told as a hit, with stale bytes")
def test_answers_come_in_the_order_of_requests(rdma_peer: Peer, server: Server) -> None:
    """P1: of many reads in flight, exactly those of missing keys fail."""
    count, nbytes = 128, 64 * KIB
    rdma_peer.register("buffer", value("sent", count * nbytes))
    every = blocks("order", count, nbytes)
    held = [([block], nbytes) for i, block in enumerate(every) if i % 3]
    assert rdma_peer.rdma_write("buffer", held) == [OK] * len(held)
    for _ in range(10):
        replies = rdma_peer.rdma_read("buffer", [([block], nbytes) for block in every])
        assert [done for done, _ in replies] == [i % 3 != 0 for i in range(count)]


def test_connect_async_connects(new_peer: NewPeer, rdma_peer: Peer) -> None:
    peer = new_peer(rdma=True, asynchronous=True)
    peer.register("buffer", value("one", 4096))
    assert peer.rdma_write("buffer", [([("one", 0)], 4096)]) == [OK]
    assert rdma_peer.exists("one")


def test_a_value_stays_when_its_writer_is_killed(new_peer: NewPeer, rdma_peer: Peer) -> None:
    """P4."""
    writer = new_peer(rdma=True)
    writer.register("buffer", value("left", 100_000))
    assert writer.rdma_write("buffer", [([("left", 0)], 100_000)]) == [OK]
    writer.kill()
    rdma_peer.register("buffer", bytes(100_000))
    assert rdma_peer.rdma_read("buffer", [([("left", 0)], 100_000)]) == [OK]
    assert rdma_peer.buffer("buffer") == value("left", 100_000)
