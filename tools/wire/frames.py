"""InfiniStore's protocol over TCP, encoded by hand: for traffic that no correct client sends."""

import socket
import struct
from collections.abc import Sequence
from types import TracebackType

import flatbuffers
from typing_extensions import Self

from tools.lab.ports import LOOPBACK

MAGIC = 0xDEADBEEF
HEADER = struct.Struct("<IBI")
CODE = struct.Struct("<i")
CODE_AND_SIZE = struct.Struct("<iI")
CODE_AND_NUMBER = struct.Struct("<ii")

EXCHANGE, EXISTS, MATCH, DELETE, PAYLOAD = b"E", b"C", b"M", b"X", b"L"
PUT, GET = b"P", b"G"
FINISH, INVALID, KEY_NOT_FOUND, OUT_OF_MEMORY = 200, 400, 404, 507
EXCHANGE_BYTES = 30
ANSWER_S = 30.0
CHUNK_BYTES = 1 << 20


class ClosedError(Exception):
    """The server has closed the connection."""


def frame(op: bytes, body: bytes = b"", *, size: int | None = None, magic: int = MAGIC) -> bytes:
    """Returns a request: header and body; ``size`` overrides the body's size in the header."""
    return HEADER.pack(magic, op[0], len(body) if size is None else size) + body


def keys_table(keys: Sequence[str | bytes]) -> bytes:
    """Returns the table of ``DELETE`` and ``MATCH``."""
    builder = flatbuffers.Builder(0)
    names = [builder.CreateString(key) for key in keys]
    builder.StartVector(4, len(names), 4)
    for name in reversed(names):
        builder.PrependUOffsetTRelative(name)
    vector = builder.EndVector()
    builder.StartObject(1)
    builder.PrependUOffsetTRelativeSlot(0, vector, 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def payload_table(key: str | bytes | None, length: int, op: bytes) -> bytes:
    """Returns the table of ``PAYLOAD``; without a key, the field is left out."""
    builder = flatbuffers.Builder(0)
    name = None if key is None else builder.CreateString(key)
    builder.StartObject(3)
    if name is not None:
        builder.PrependUOffsetTRelativeSlot(0, name, 0)
    builder.PrependInt32Slot(1, length, 0)
    builder.PrependInt8Slot(2, op[0], 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def put_frame(key: str, length: int) -> bytes:
    """Returns the announcement of a value, whose bare bytes follow."""
    return frame(PAYLOAD, payload_table(key, length, PUT))


def get_frame(key: str) -> bytes:
    """Returns a request for a value."""
    return frame(PAYLOAD, payload_table(key, 0, GET))


class Raw:
    """One TCP connection to a server's service port."""

    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(ANSWER_S)
        self.socket.connect((LOOPBACK, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        """Sends all of ``data``.

        Raises:
            ClosedError: the server has closed the connection.
            TimeoutError: the server does not read it.
        """
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ClosedError(str(error)) from error

    def receive(self, nbytes: int) -> bytes:
        """Returns exactly ``nbytes`` bytes.

        Raises:
            ClosedError: the server has closed the connection.
            TimeoutError: they do not arrive.
        """
        parts = []
        while nbytes:
            try:
                part = self.socket.recv(min(nbytes, CHUNK_BYTES))
            except ConnectionResetError as error:
                raise ClosedError("reset by the server") from error
            if not part:
                raise ClosedError("closed by the server")
            parts.append(part)
            nbytes -= len(part)
        return b"".join(parts)

    def code(self) -> int:
        """Receives a bare code."""
        (code,) = CODE.unpack(self.receive(CODE.size))
        return int(code)

    def put(self, key: str, value: bytes) -> int:
        """Stores a value. Returns the server's code."""
        self.send(put_frame(key, len(value)))
        self.send(value)
        return self.code()

    def value(self) -> bytes | None:
        """Receives the answer to a ``GET``; None for a miss."""
        code = self.code()
        if code == KEY_NOT_FOUND:
            return None
        if code != FINISH:
            raise ValueError(f"the answer of a GET has code {code}")
        (nbytes,) = struct.unpack("<I", self.receive(4))
        return self.receive(nbytes)

    def get(self, key: str) -> bytes | None:
        """Returns a value; None for a miss."""
        self.send(get_frame(key))
        return self.value()

    def number(self) -> int:
        """Receives the answer to ``EXISTS``, ``MATCH`` and ``DELETE``."""
        code, number = CODE_AND_NUMBER.unpack(self.receive(CODE_AND_NUMBER.size))
        if code != FINISH:
            raise ValueError(f"the answer has code {code}")
        return int(number)

    def exists(self, key: bytes) -> bool:
        """Returns whether a key has a value."""
        self.send(frame(EXISTS, key))
        return self.number() == 0

    def match(self, keys: Sequence[str]) -> int:
        """Returns the index of the last leading key that is present; -1 for none."""
        self.send(frame(MATCH, keys_table(keys)))
        return self.number()

    def delete(self, keys: Sequence[str]) -> int:
        """Deletes keys. Returns how many of them existed."""
        self.send(frame(DELETE, keys_table(keys)))
        return self.number()

    def reset(self) -> None:
        """Resets the connection instead of closing it in order."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
