"""Frames that no correct client sends."""

import random
from contextlib import suppress

from tools.wire import frames
from tools.wire.faults.harness import KIB, MIB, WITNESSES, answer_code, fault, must, refused
from tools.wire.frames import ClosedError, Raw
from tools.wire.servers import Server

SEED = 20261122
MUTATIONS = 400
# A server under test has a pool of 1 GiB.
TOO_LARGE_BYTES = 1536 * MIB
STREAMED_BYTES = 96 * MIB
# Memory that a server may use for one frame that it has not yet refused, over all connections that send one.
RSS_LIMIT_BYTES = 64 * MIB


def _send_and_see(server: Server, data: bytes) -> str:
    with Raw(server.port) as raw:
        try:
            raw.send(data)
        except ClosedError:
            return "closed"
        return answer_code(raw)


@fault()
def garbage_in_delete(server: Server) -> str:
    """A table that is none is refused."""
    return refused(_send_and_see(server, frames.frame(frames.DELETE, b"\xff" * 64)))


@fault()
def garbage_in_match(server: Server) -> str:
    """A table that is none is refused."""
    return refused(_send_and_see(server, frames.frame(frames.MATCH, b"\x7f" * 64)))


@fault()
def garbage_in_payload(server: Server) -> str:
    """A table that is none is refused."""
    return refused(_send_and_see(server, frames.frame(frames.PAYLOAD, b"\xfe" * 64)))


@fault()
def payload_without_key(server: Server) -> str:
    """A request without its key is refused."""
    table = frames.payload_table(None, 100, frames.PUT)
    return refused(_send_and_see(server, frames.frame(frames.PAYLOAD, table)))


@fault()
def payload_of_unknown_kind(server: Server) -> str:
    """A request that is neither put nor get is refused."""
    table = frames.payload_table("key", 100, b"Z")
    return refused(_send_and_see(server, frames.frame(frames.PAYLOAD, table)))


@fault()
def mutated_tables(server: Server) -> str:
    """400 tables with changed bytes (seeded): the server lives and no key appears that was not put."""
    rng = random.Random(SEED)
    answers: dict[str, int] = {}
    names = ["m-1", "m-2", "m-3"]
    for _ in range(MUTATIONS):
        op, table = rng.choice(
            [
                (frames.DELETE, frames.keys_table(names)),
                (frames.MATCH, frames.keys_table(names)),
                (frames.PAYLOAD, frames.payload_table("m-1", 0, frames.GET)),
            ]
        )
        body = bytearray(table)
        for _ in range(rng.randint(1, 6)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        if rng.random() < 0.3:
            del body[rng.randrange(len(body)) :]
        with Raw(server.port) as raw:
            # A mutated GET may be a PUT that waits for its bytes.
            raw.socket.settimeout(0.2)
            try:
                raw.send(frames.frame(op, bytes(body)))
                answer = answer_code(raw)
            except ClosedError:
                answer = "closed"
        answers[answer] = answers.get(answer, 0) + 1
        must(server.alive, f"died (seed {SEED})")
    must(server.kvmap_len() == len(WITNESSES), f"{server.kvmap_len()} keys (seed {SEED})")
    return ", ".join(f"{count} x {answer}" for answer, count in sorted(answers.items()))


@fault()
def bad_length_negative(server: Server) -> str:
    """A value of length -1 is refused; what follows changes no other value."""
    answer = "closed"
    with Raw(server.port) as raw, Raw(server.port) as other:
        with suppress(ClosedError):
            raw.send(frames.put_frame("evil", -1))
            raw.send(b"\x66" * MIB)
        must(other.put("bystander", b"\x11" * MIB) == frames.FINISH, "another's value was refused")
        with suppress(ClosedError):
            raw.send(b"\x66" * MIB)
            answer = answer_code(raw)
        must(other.get("bystander") == b"\x11" * MIB, "another's value has changed")
    return refused(answer)


@fault()
def bad_length_smallest(server: Server) -> str:
    """A value of length -2^31 is refused."""
    return refused(_send_and_see(server, frames.put_frame("evil", -(1 << 31))))


@fault()
def bad_length_zero(server: Server) -> str:
    """A value of length 0 is refused, and is a miss afterwards."""
    with Raw(server.port) as raw:
        raw.send(frames.put_frame("empty", 0))
        answer = answer_code(raw)
    with Raw(server.port) as raw:
        must(raw.get("empty") is None, "an empty value is there")
    return refused(answer)


@fault()
def put_larger_than_pool(server: Server) -> str:
    """A value larger than the pool is refused, and its bytes are never taken for requests."""
    smuggled = frames.frame(frames.DELETE, frames.keys_table(list(WITNESSES)))
    part = smuggled * (MIB // len(smuggled))
    count = TOO_LARGE_BYTES // len(part)
    answer = "closed"
    with Raw(server.port) as raw, suppress(ClosedError):
        raw.send(frames.put_frame("huge", len(part) * count))
        for _ in range(count):
            raw.send(part)
        answer = answer_code(raw)
    with Raw(server.port) as raw:
        must(all(raw.exists(key.encode()) for key in WITNESSES), "the value's bytes were taken for requests")
    return refused(answer)


@fault()
def body_of_four_gib(server: Server) -> str:
    """A body of 4 GiB is refused before memory is taken for it."""
    before, answers = server.rss_bytes(), []
    for _ in range(4):
        with Raw(server.port) as raw:
            try:
                raw.send(frames.frame(frames.DELETE, size=0xFFFF_FFFF))
                for _ in range(STREAMED_BYTES // MIB):
                    raw.send(b"\0" * MIB)
                raw.socket.settimeout(0.5)
                answers.append(answer_code(raw))
            except ClosedError:
                answers.append("closed")
    grown = max(0, server.rss_bytes() - before)
    must(grown < RSS_LIMIT_BYTES, f"memory grew by {grown // MIB} MiB")
    return refused(answers[0])


@fault()
def exchange_too_long(server: Server) -> str:
    """An RDMA exchange of 1 MiB is refused."""
    return refused(_send_and_see(server, frames.frame(frames.EXCHANGE, b"\x41" * MIB)))


@fault()
def exchange_too_short(server: Server) -> str:
    """An RDMA exchange of 3 bytes is refused."""
    return refused(_send_and_see(server, frames.frame(frames.EXCHANGE, b"\x41" * 3)))


@fault(rdma=True)
def exchange_of_garbage(server: Server) -> str:
    """An RDMA exchange with a queue that does not exist harms nobody, forty times."""
    rng = random.Random(SEED)
    for _ in range(40):
        answer = _send_and_see(server, frames.frame(frames.EXCHANGE, rng.randbytes(frames.EXCHANGE_BYTES)))
    must(answer != "silence", "no answer")
    return answer


@fault()
def rdma_requests_over_tcp(server: Server) -> str:
    """Requests that belong into RDMA messages are refused on TCP."""
    return refused(
        ", ".join({_send_and_see(server, frames.frame(op, frames.keys_table(["witness-0"]))) for op in (b"A", b"W")})
    )


@fault()
def wrong_magic(server: Server) -> str:
    """A frame of another protocol is refused."""
    return refused(_send_and_see(server, frames.frame(frames.EXISTS, b"witness-0", magic=0xCAFEBABE)))


@fault()
def unknown_operation(server: Server) -> str:
    """An operation that does not exist is refused."""
    return refused(_send_and_see(server, frames.frame(b"?", b"witness-0")))


@fault()
def http_on_the_service_port(server: Server) -> str:
    """A browser that knocks at the wrong door is refused."""
    return refused(_send_and_see(server, b"GET /kvmap_len HTTP/1.1\r\nHost: localhost\r\n\r\n"))


@fault()
def random_bytes(server: Server) -> str:
    """Random bytes of 30 lengths (seeded), with and without a good magic, harm nobody."""
    rng = random.Random(SEED)
    for turn in range(30):
        with Raw(server.port) as raw:
            start = frames.MAGIC.to_bytes(4, "little") if turn % 2 else b""
            try:
                raw.send(start + rng.randbytes(rng.randrange(1, 256 * KIB)))
            except (ClosedError, TimeoutError):
                continue
        must(server.alive, f"died (seed {SEED}, turn {turn})")
    return "lives"


@fault()
def empty_key_asked(server: Server) -> str:
    """A question with an empty key is answered at once, with no or a refusal."""
    answer = _send_and_see(server, frames.frame(frames.EXISTS))
    must(answer != "silence", "no answer until more bytes come")
    return answer


@fault()
def strange_keys_asked(server: Server) -> str:
    """A key may hold any bytes, and is told apart from its neighbours."""
    with Raw(server.port) as raw:
        for key in (b"witness-0\0", b"\0", b"\xff\xfe", b"witness-0\nwitness-1", b"%s%n%d", b"k" * 4000):
            must(not raw.exists(key), f"{key[:20]!r} is said to exist")
        must(raw.exists(b"witness-0"), "a key was lost")
    return "no"


@fault()
def key_of_four_mib(server: Server) -> str:
    """A question with a key of 4 MiB is answered or refused, in bounded time."""
    answer = _send_and_see(server, frames.frame(frames.EXISTS, b"k" * (4 * MIB)))
    must(answer != "silence", "no answer")
    return answer
