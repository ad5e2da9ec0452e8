"""Correct frames in unusual number, order or speed."""

import time
from contextlib import ExitStack

from tools.wire import frames
from tools.wire.faults.harness import MIB, WITNESSES, fault, must
from tools.wire.frames import Raw
from tools.wire.servers import Server

IDLE = 500
STORM = 1000
SETTLE_S = 60.0
LARGE_BYTES = 64 * MIB
SLOW_READERS = 16
RSS_LIMIT_BYTES = 256 * MIB


def _settled_files(server: Server, limit: int) -> int:
    """Open files of the server when there are no more than ``limit``, or after a while."""
    end_s = time.monotonic() + SETTLE_S
    while server.open_files() > limit and time.monotonic() < end_s:
        time.sleep(0.05)
    return server.open_files()


@fault()
def byte_by_byte(server: Server) -> str:
    """A conversation sent byte by byte is understood."""
    with Raw(server.port) as raw:
        talk = frames.put_frame("drip", 100) + b"\x77" * 100 + frames.get_frame("drip")
        for number in range(len(talk)):
            raw.send(talk[number : number + 1])
        must(raw.code() == frames.FINISH, "refused")
        must(raw.value() == b"\x77" * 100, "a wrong value")
    return "understood"


@fault()
def gets_without_waiting(server: Server) -> str:
    """Twenty requests sent at once are answered in their order."""
    order = [*WITNESSES, *reversed(WITNESSES)]
    with Raw(server.port) as raw:
        raw.send(b"".join(frames.get_frame(key) for key in order))
        for key in order:
            must(raw.value() == WITNESSES[key], f"a wrong value for {key}")
    return "in order"


@fault()
def everything_without_waiting(server: Server) -> str:
    """Requests of all kinds sent at once, values among them, are answered in their order."""
    with Raw(server.port) as raw:
        one = (
            frames.put_frame("mixed", 5)
            + b"abcde"
            + frames.get_frame("mixed")
            + frames.frame(frames.EXISTS, b"mixed")
            + frames.get_frame("none")
            + frames.frame(frames.DELETE, frames.keys_table(["mixed"]))
        )
        raw.send(one * 20)
        for turn in range(20):
            must(raw.code() == frames.FINISH, f"turn {turn}: refused")
            must(raw.value() == b"abcde", f"turn {turn}: a wrong value")
            must(raw.number() == 0, f"turn {turn}: said not to exist")
            must(raw.value() is None, f"turn {turn}: a value from nowhere")
            must(raw.number() == 1, f"turn {turn}: not deleted")
    return "in order"


@fault()
def miss_then_more(server: Server) -> str:
    """A miss is four bytes, and the connection goes on."""
    with Raw(server.port) as raw:
        for _ in range(100):
            must(raw.get("none") is None, "a value from nowhere")
        must(raw.get("witness-1") == WITNESSES["witness-1"], "a wrong value")
    return "404"


@fault()
def idle_connections(server: Server) -> str:
    """500 idle connections do not keep another from being served, and leave nothing."""
    before = server.open_files()
    with ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(Raw(server.port))
        with Raw(server.port) as raw:
            must(raw.get("witness-1") == WITNESSES["witness-1"], "a wrong value")
    after = _settled_files(server, before)
    must(after <= before, f"{after - before} files left open")
    return "served"


@fault()
def connection_storm(server: Server) -> str:
    """1000 connections made and left at once leave no open file."""
    before = server.open_files()
    for number in range(STORM):
        raw = Raw(server.port)
        if number % 3 == 0:
            raw.reset()
        else:
            raw.close()
    after = _settled_files(server, before)
    must(after <= before, f"{after - before} files left open")
    return "no file left"


@fault()
def readers_that_do_not_read(server: Server) -> str:
    """Sixteen readers that take no byte of 64 MiB do not keep others waiting, and cost no copy each."""
    with ExitStack() as stack:
        with Raw(server.port) as raw:
            must(raw.put("large", b"\x01" * LARGE_BYTES) == frames.FINISH, "refused")
        before = server.rss_bytes()
        for _ in range(SLOW_READERS):
            reader = stack.enter_context(Raw(server.port, receive_buffer=4096))
            reader.send(frames.get_frame("large"))
        with Raw(server.port) as raw:
            for _ in range(50):
                must(raw.get("witness-1") == WITNESSES["witness-1"], "a wrong value")
        grown = max(0, server.rss_bytes() - before)
    must(grown < RSS_LIMIT_BYTES, f"memory grew by {grown // MIB} MiB")
    return f"others served, {grown // MIB} MiB"


@fault()
def hot_key_under_eviction(server: Server) -> str:
    """A key written again and again is not the first to go when the pool is full."""
    nbytes = 16 * MIB
    with Raw(server.port) as raw:
        must(raw.put("hot", b"\x01" * nbytes) == frames.FINISH, "refused")
        for i in range(40):
            raw.put(f"old-{i}", bytes([i]) * nbytes)
        must(raw.put("hot", b"\x02" * nbytes) == frames.FINISH, "refused")
        for i in range(25):
            raw.put(f"new-{i}", bytes([i]) * nbytes)
        older = sum(raw.exists(f"old-{i}".encode()) for i in range(40))
        hot = raw.get("hot")
        must(hot is not None or not older, f"the newest value of a key went, and {older} older ones stayed")
        must(hot in (None, b"\x02" * nbytes), "an old value of it is back")
        # The pool was full on purpose, so witnesses may have gone.
        for key, value in WITNESSES.items():
            raw.put(key, value)
    return "kept" if hot else "evicted with all older ones"


@fault()
def purge_gives_space_back(server: Server) -> str:
    """After a purge the whole pool is free: what fits, stays."""
    nbytes, count = 16 * MIB, 40
    with Raw(server.port) as raw:
        for turn in range(4):
            for i in range(count):
                must(raw.put(f"{turn}-{i}", bytes([turn]) * nbytes) == frames.FINISH, f"turn {turn}: refused")
            held = sum(raw.exists(f"{turn}-{i}".encode()) for i in range(count))
            must(held == count, f"turn {turn}: {held} of {count} values stayed, {count * nbytes >> 20} MiB of 1 GiB")
            server.purge()
        for key, value in WITNESSES.items():
            raw.put(key, value)
    return "free"


@fault()
def management_garbage(server: Server) -> str:
    """Nonsense on the management port harms nobody."""
    for data in (
        b"\0" * 10_000,
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000,
        b"POST /purge HTTP/1.1\r\nContent-Length: -1",
    ):
        with Raw(server.manage_port) as raw:
            try:
                raw.send(data)
                raw.socket.settimeout(0.5)
                raw.receive(1)
            except (TimeoutError, frames.ClosedError):
                continue
    return f"{server.kvmap_len()} keys"
