"""InfiniStore's own client over TCP: every public method, and the documented behaviour of each."""

import pytest
from conftest import NewPeer
from values import stamped, value

from tools.wire.client import Peer, PeerDiedError, PeerError, PeerHungError
from tools.wire.servers import Server

KIB, MIB = 1 << 10, 1 << 20
# Around the server's pieces of 64 KiB and 256 KiB, and not multiples of anything.
SIZES = [1, 7, 100, 4095, 4 * KIB, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 200_000, 256 * KIB, 256 * KIB + 1, 300_000]
LARGE_SIZES = [512 * KIB, MIB, MIB + 1, 4 * MIB, 4 * MIB + 3, 32 * MIB]
# The client itself decides what it reports about a missing key: it waits for more, or crashes.
MISS_S = 3.0


@pytest.mark.parametrize("nbytes", SIZES + LARGE_SIZES)
def test_a_value_comes_back_whole(peer: Peer, nbytes: int) -> None:
    for i in range(3):
        key = f"key-{nbytes}-{i}"
        peer.put(key, value(key, nbytes))
        assert peer.get(key) == value(key, nbytes)


def test_many_keys_keep_their_own_values(peer: Peer, server: Server) -> None:
    keys = [f"many-{i}" for i in range(300)]
    for i, key in enumerate(keys):
        peer.put(key, value(key, 1 + 37 * i))
    assert server.kvmap_len() == len(keys)
    for i, key in enumerate(keys):
        assert peer.get(key) == value(key, 1 + 37 * i)


@pytest.mark.parametrize(
    "key", ["k", "ключ-键-🔑", "a b\tc\nd", "/../x", "x" * 255, "x" * 1000, "'\";--", "model@1@0@abc@half"]
)
def test_keys_are_any_text(peer: Peer, key: str) -> None:
    peer.put(key, value(key, 5000))
    assert peer.exists(key)
    assert peer.get(key) == value(key, 5000)
    assert not peer.exists(key + "x")
    assert not peer.exists(key[:-1] + "\x01")
    assert peer.match([key]) == 0
    assert peer.delete([key]) == 1
    assert not peer.exists(key)


def test_what_one_client_writes_another_reads(new_peer: NewPeer) -> None:
    first, second = new_peer(), new_peer()
    first.put("shared", value("shared", 100_000))
    assert second.exists("shared")
    assert second.get("shared") == value("shared", 100_000)
    assert second.delete(["shared"]) == 1
    assert not first.exists("shared")


def test_a_value_stays_when_its_writer_has_gone(new_peer: NewPeer) -> None:
    writer, reader = new_peer(), new_peer()
    writer.put("left", value("left", 70_000))
    writer.call("close")
    writer.kill()
    assert reader.get("left") == value("left", 70_000)


@pytest.mark.parametrize(("before", "after"), [(5000, 5000), (64 * KIB, 10), (10, 3 * MIB), (3 * MIB, 10)])
def test_a_value_is_replaced(peer: Peer, server: Server, before: int, after: int) -> None:
    peer.put("again", value("again", before, 1))
    peer.put("again", value("again", after, 2))
    assert peer.get("again") == value("again", after, 2)
    assert server.kvmap_len() == 1


def test_exists_says_yes_and_no(peer: Peer) -> None:
    assert not peer.exists("there")
    peer.put("there", b"x")
    assert peer.exists("there")
    assert not peer.exists("the")
    assert not peer.exists("there ")


@pytest.mark.parametrize("held", [0, 1, 2, 5, 16, 63])
def test_match_gives_the_last_leading_key(peer: Peer, held: int) -> None:
    keys = [f"chain-{i}" for i in range(64)]
    for key in keys[:held]:
        peer.put(key, b"x" * 10)
    if held:
        assert peer.match(keys) == held - 1
        assert peer.match(keys[:held]) == held - 1
        assert peer.match(keys[:1]) == 0
    else:
        with pytest.raises(PeerError, match="can't find a match"):
            peer.match(keys)


def test_match_stops_at_a_hole(peer: Peer) -> None:
    peer.put("p0", b"x")
    peer.put("p1", b"x")
    assert peer.match(["p0", "hole", "p1"]) == 0


@pytest.mark.peer_fault("bisects, so a key behind a hole is taken for the end of a prefix: a false hit")
def test_match_needs_the_first_key(peer: Peer) -> None:
    peer.put("p0", b"x")
    peer.put("p1", b"x")
    with pytest.raises(PeerError, match="can't find a match"):
        peer.match(["hole", "p0", "p1"])


@pytest.mark.peer_fault("bisects, so a key behind a hole is taken for the end of a prefix: a false hit")
def test_match_does_not_jump_over_a_hole(peer: Peer) -> None:
    keys = [f"jump-{i}" for i in range(9)]
    for i, key in enumerate(keys):
        if i != 2:
            peer.put(key, b"x")
    assert peer.match(keys) == 1


def test_match_of_thousands_of_keys(peer: Peer) -> None:
    keys = [f"long-chain-of-tokens-{i:08}" for i in range(20_000)]
    for key in keys[:50]:
        peer.put(key, b"x")
    assert peer.match(keys) == 49


def test_delete_counts_what_it_deleted(peer: Peer, server: Server) -> None:
    for i in range(5):
        peer.put(f"gone-{i}", b"x" * 100)
    assert peer.delete(["gone-0", "gone-1", "never"]) == 2
    assert peer.delete(["gone-0", "gone-1"]) == 0
    assert [peer.exists(f"gone-{i}") for i in range(5)] == [False, False, True, True, True]
    assert server.kvmap_len() == 3


def test_a_key_named_twice_is_deleted_once(peer: Peer) -> None:
    peer.put("twice", b"x")
    assert peer.delete(["twice", "twice"]) == 1


def test_a_deleted_key_can_be_written_again(peer: Peer) -> None:
    for i in range(20):
        peer.put("phoenix", value("phoenix", 10_000, i))
        assert peer.get("phoenix") == value("phoenix", 10_000, i)
        assert peer.delete(["phoenix"]) == 1


def test_a_miss_is_told_in_the_only_way_that_the_client_survives(peer: Peer, server: Server) -> None:
    """The client waits for eight bytes where a miss has four, and crashes on any longer answer: it must ask before.

    Here the four bytes arrive, so the client waits; the server is healthy, and other clients are served.
    """
    with pytest.raises(PeerHungError):
        peer.get("missing", timeout_s=MISS_S)
    with Peer(server) as other:
        assert not other.exists("missing")


def test_purge_forgets_all(peer: Peer, server: Server) -> None:
    for i in range(10):
        peer.put(f"purged-{i}", b"x" * 1000)
    assert server.kvmap_len() == 10
    assert server.purge() == 10
    assert server.kvmap_len() == 0
    assert not peer.exists("purged-0")
    peer.put("purged-0", value("purged-0", 1000))
    assert peer.get("purged-0") == value("purged-0", 1000)


def test_connect_async_connects(new_peer: NewPeer) -> None:
    peer = new_peer(asynchronous=True)
    peer.put("async", value("async", 1000))
    assert peer.get("async") == value("async", 1000)


def test_closed_and_connected_again(peer: Peer) -> None:
    peer.put("kept", value("kept", 1000))
    for _ in range(5):
        peer.call("close")
        peer.connect()
        assert peer.get("kept") == value("kept", 1000)


def test_rdma_methods_refuse_without_rdma(peer: Peer) -> None:
    with pytest.raises(PeerError, match="only valid for connected rdma"):
        peer.register("buffer", b"x" * 4096)


def test_a_dead_server_is_an_error_of_the_client(new_server: object) -> None:
    server = new_server()
    with Peer(server) as peer:
        peer.put("lost", b"x")
        server.kill()
        with pytest.raises((PeerError, PeerDiedError)):
            peer.exists("lost")
    with pytest.raises(PeerError, match="Failed to initialize"):
        Peer(server).close()


def test_writers_and_readers_of_one_key_see_whole_values(new_peer: NewPeer) -> None:
    """P1: every read returns one of the values that were written, never a mixture."""
    nbytes = 1_000_003
    writers, readers = [new_peer() for _ in range(2)], [new_peer() for _ in range(2)]
    writers[0].put("hot", stamped(0, nbytes))
    for turn in range(15):
        for i, writer in enumerate(writers):
            writer.send("tcp_write_cache", "hot", stamped(1 + 2 * turn + i, nbytes))
        for reader in readers:
            reader.send("tcp_read_cache", "hot")
        for writer in writers:
            writer.receive("tcp_write_cache")
        for reader in readers:
            got = reader.receive("tcp_read_cache")
            number = int.from_bytes(got[:8], "little")
            assert number <= 2 + 2 * turn
            assert got == stamped(number, nbytes)


def test_a_full_pool_evicts_and_serves_on(new_server: object) -> None:
    """P5: four times the pool is written; values that are present are correct, and the newest is present."""
    server = new_server(pool_gib=1)
    nbytes, count = 16 * MIB, 256
    with Peer(server) as peer:
        for i in range(count):
            peer.put(f"full-{i}", stamped(i, nbytes))
        held = [i for i in range(count) if peer.exists(f"full-{i}")]
        assert count - 1 in held
        assert 16 <= len(held) <= 64
        for i in held:
            assert peer.get(f"full-{i}") == stamped(i, nbytes)
    assert server.kvmap_len() == len(held)


@pytest.mark.peer_fault("the old copy stays in the recency list, and its eviction erases the new value")
def test_a_key_written_anew_is_not_evicted_before_older_ones(new_server: object) -> None:
    server = new_server(pool_gib=1)
    nbytes = 16 * MIB
    with Peer(server) as peer:
        peer.put("hot", stamped(1, nbytes))
        for i in range(40):
            peer.put(f"old-{i}", stamped(i, nbytes))
        peer.put("hot", stamped(2, nbytes))
        for i in range(25):
            peer.put(f"new-{i}", stamped(i, nbytes))
        kept = [i for i in range(40) if peer.exists(f"old-{i}")]
        assert kept, "the pool was to keep some older keys, or this shows nothing"
        assert peer.exists("hot")
        assert peer.get("hot") == stamped(2, nbytes)
