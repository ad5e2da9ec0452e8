"""Clients that stop midway, and others that meet what those have begun."""

import time
from collections.abc import Callable
from contextlib import suppress

from tools.wire import frames
from tools.wire.faults.harness import MIB, WITNESSES, answer_code, fault, must
from tools.wire.frames import ClosedError, Raw
from tools.wire.servers import Server

LARGE_BYTES = 64 * MIB
# Together eight times the pool of a server under test.
ABANDONED, ABANDONED_BYTES = 128, 64 * MIB
SPACE_S = 60.0


def _large(fill: int) -> bytes:
    return bytes([fill]) * LARGE_BYTES


@fault()
def reset_during_get(server: Server) -> str:
    """A reader that resets its connection in the middle of a value harms nobody, ten times."""
    with Raw(server.port) as raw:
        raw.put("large", _large(1))
    for _ in range(10):
        with suppress(ClosedError):
            raw = Raw(server.port)
            raw.send(frames.get_frame("large"))
            raw.receive(100_000)
            raw.reset()
    with Raw(server.port) as raw:
        must(raw.get("large") == _large(1), "the value has changed")
    return "lives"


@fault()
def get_of_a_value_on_its_way(server: Server) -> str:
    """A value that is not yet whole is a miss; it is there when its writer is told so."""
    with Raw(server.port) as writer, Raw(server.port) as reader:
        writer.send(frames.put_frame("coming", 2 * MIB))
        writer.send(b"\x11" * MIB)
        early = reader.exists(b"coming")
        got = reader.get("coming")
        writer.send(b"\x11" * MIB)
        must(writer.code() == frames.FINISH, "the writer was refused")
        must(not early and got is None, "half a value was visible")
        must(reader.get("coming") == b"\x11" * 2 * MIB, "the value is not whole")
    return "miss, then whole"


@fault()
def match_of_a_value_on_its_way(server: Server) -> str:
    """A value that is not yet whole ends a prefix."""
    with Raw(server.port) as writer, Raw(server.port) as reader:
        writer.send(frames.put_frame("coming", 2 * MIB))
        writer.send(b"\x11" * MIB)
        # Answers another request on a third connection: the announcement has been read by now, or arrives later.
        must(reader.exists(b"witness-1"), "a key was lost")
        found = reader.match(["witness-0", "coming"])
        must(found == 0, f"half a value was counted: {found}")
    return "0"


@fault()
def delete_of_a_value_on_its_way(server: Server) -> str:
    """Deleting a value that is not yet whole deletes nothing, and its writer ends well."""
    with Raw(server.port) as writer, Raw(server.port) as other:
        writer.send(frames.put_frame("coming", 2 * MIB))
        writer.send(b"\x22" * MIB)
        deleted = other.delete(["coming"])
        writer.send(b"\x22" * MIB)
        must(writer.code() == frames.FINISH, "the writer was refused")
        must(deleted == 0, "half a value was counted")
        must(other.get("coming") == b"\x22" * 2 * MIB, "the value is not whole")
    return "0"


@fault()
def writer_dies(server: Server) -> str:
    """A value whose writer went away is a miss, and no key remains."""
    for end in ("close", "reset"):
        writer = Raw(server.port)
        writer.send(frames.put_frame("phantom", 2 * MIB))
        writer.send(b"\x33" * MIB)
        getattr(writer, end)()
    with Raw(server.port) as reader:
        got = reader.get("phantom")
        must(got is None, "half a value was given")
        must(not reader.exists(b"phantom"), "half a value is said to exist")
    must(server.kvmap_len() == len(WITNESSES), f"{server.kvmap_len()} keys")
    return "miss"


@fault()
def writer_dies_replacing(server: Server) -> str:
    """A writer that dies in the middle of a new value leaves the old one."""
    writer = Raw(server.port)
    writer.send(frames.put_frame("witness-3", 2 * MIB))
    writer.send(b"\x33" * MIB)
    writer.reset()
    with Raw(server.port) as reader:
        must(reader.get("witness-3") == WITNESSES["witness-3"], "the old value is gone")
    return "old value"


@fault()
def many_writers_die(server: Server) -> str:
    """Space announced by writers that died comes back: eight times the pool is announced, then it takes a value."""
    for _ in range(ABANDONED):
        with suppress(ClosedError), Raw(server.port) as writer:
            writer.send(frames.put_frame("abandoned", ABANDONED_BYTES))
            writer.send(b"\x44" * 1000)
    with Raw(server.port) as raw:
        end_s = time.monotonic() + SPACE_S
        # The server notices one end after another. Until then it has no space, and no other trouble.
        while (code := raw.put("after", _large(5))) == frames.OUT_OF_MEMORY and time.monotonic() < end_s:
            time.sleep(0.05)
        must(code == frames.FINISH, f"no space for a value afterwards: {code}")
        must(raw.get("after") == _large(5), "the value is not whole")
    return str(code)


@fault()
def many_writers_wait(server: Server) -> str:
    """Writers that announce eight times the pool and send nothing are refused; other values stay."""
    writers = [Raw(server.port) for _ in range(ABANDONED)]
    answers: dict[str, int] = {}
    try:
        for number, writer in enumerate(writers):
            with suppress(ClosedError):
                writer.send(frames.put_frame(f"waiting-{number}", ABANDONED_BYTES))
        for writer in writers:
            writer.socket.settimeout(0.05)
            answer = answer_code(writer)
            answers[answer] = answers.get(answer, 0) + 1
        with Raw(server.port) as raw:
            must(raw.exists(b"witness-1"), "a key was lost to values that never came")
    finally:
        for writer in writers:
            writer.close()
    with Raw(server.port) as raw:
        must(raw.put("after", b"x" * 1000) == frames.FINISH, "no space for a value afterwards")
    return ", ".join(f"{count} x {answer}" for answer, count in sorted(answers.items()))


@fault()
def replaced_while_read(server: Server) -> str:
    """A reader in the middle of a value gets that value whole, though it is replaced meanwhile."""
    return _changed_while_read(server, lambda raw: raw.put("large", _large(2)) == frames.FINISH)


@fault()
def deleted_while_read(server: Server) -> str:
    """A reader in the middle of a value gets that value whole, though it is deleted meanwhile."""
    return _changed_while_read(server, lambda raw: raw.delete(["large"]) == 1)


@fault()
def purged_while_read(server: Server) -> str:
    """A reader in the middle of a value gets that value whole, though all is purged meanwhile."""

    def change(raw: Raw) -> bool:
        server.purge()
        for key, value in WITNESSES.items():
            raw.put(key, value)
        return all(raw.put(f"new-{i}", _large(9)) == frames.FINISH for i in range(4))

    return _changed_while_read(server, change)


def _changed_while_read(server: Server, change: Callable[[Raw], bool]) -> str:
    with Raw(server.port, receive_buffer=4096) as reader, Raw(server.port) as other:
        other.put("large", _large(1))
        reader.send(frames.get_frame("large"))
        must(reader.code() == frames.FINISH, "the value is not there")
        must(change(other), "the change was refused")
        nbytes = int.from_bytes(reader.receive(4), "little")
        must(nbytes == LARGE_BYTES, f"a length of {nbytes}")
        must(reader.receive(nbytes) == _large(1), "the value changed under its reader")
    return "whole"


@fault()
def half_a_header_for_ever(server: Server) -> str:
    """Clients that stop in the middle of a header do not keep others waiting."""
    stuck = [Raw(server.port) for _ in range(50)]
    for raw in stuck:
        raw.send(frames.frame(frames.EXISTS, b"witness-0")[:5])
    with Raw(server.port) as raw:
        must(raw.exists(b"witness-0"), "a key was lost")
    for raw in stuck:
        raw.close()
    return "others served"


@fault()
def announced_twice(server: Server) -> str:
    """Two writers of one key, each in the middle: both end, and one of the two values is there, whole."""
    with Raw(server.port) as first, Raw(server.port) as second:
        for fill, raw in enumerate((first, second), 1):
            raw.send(frames.put_frame("both", 2 * MIB))
            raw.send(bytes([fill]) * MIB)
        for fill, raw in enumerate((first, second), 1):
            raw.send(bytes([fill]) * MIB)
        must(first.code() == second.code() == frames.FINISH, "a writer was refused")
        got = first.get("both")
        must(got in (b"\1" * 2 * MIB, b"\2" * 2 * MIB), "a mixture of two values")
    return "one of the two"


@fault()
def empty_key_put(server: Server) -> str:
    """After a value without a key's name, taken or refused, a connection goes on in step or is closed."""
    with Raw(server.port) as raw:
        answer = "closed"
        with suppress(ClosedError):
            raw.send(frames.put_frame("", 1000))
            raw.send(b"\x55" * 1000)
            answer = answer_code(raw)
            must(answer != "silence", "no answer")
            must(raw.exists(b"witness-0"), "out of step")
    return answer
