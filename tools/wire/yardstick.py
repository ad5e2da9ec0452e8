"""Current bandwidth and latency of this machine's loopback, without any protocol: the baseline of a server over TCP."""

import socket
import statistics
import threading
import time

from tools.lab.ports import LOOPBACK

CHUNK_BYTES = 1 << 20
PING_BYTES = 64
PAUSE_S = 60.0


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((LOOPBACK, 0)) as listener:
        near = socket.create_connection(listener.getsockname(), PAUSE_S)
        far, _ = listener.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(PAUSE_S)
    return near, far


def _receive(end: socket.socket, buffer: memoryview) -> bool:
    got = 0
    while got < len(buffer):
        part = end.recv_into(buffer[got:])
        if not part:
            return False
        got += part
    return True


def stream_bytes_per_s(seconds: float) -> float:
    """Measures one connection, one way; sender and receiver are threads whose system calls overlap."""
    near, far = _connected()

    def fill() -> None:
        data, end_s = bytes(CHUNK_BYTES), time.monotonic() + seconds
        near.sendall(data)  # a rate of nothing would be no yardstick
        while time.monotonic() < end_s:
            near.sendall(data)
        near.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=fill)
    total, buffer, start_s = 0, bytearray(CHUNK_BYTES), time.monotonic()
    sender.start()
    while part := far.recv_into(buffer):
        total += part
    took_s = time.monotonic() - start_s
    sender.join()
    near.close()
    far.close()
    return total / took_s


def round_trip_s(answer_bytes: int, count: int) -> float:
    """Returns the median time from a small request to an answer of that size, both sent at once."""
    near, far = _connected()

    def answer() -> None:
        question, data = memoryview(bytearray(PING_BYTES)), bytes(answer_bytes)
        while _receive(far, question):
            far.sendall(data)

    answerer = threading.Thread(target=answer)
    answerer.start()
    took_s, question, buffer = [], bytes(PING_BYTES), memoryview(bytearray(answer_bytes))
    for _ in range(count):
        before_s = time.monotonic()
        near.sendall(question)
        _receive(near, buffer)
        took_s.append(time.monotonic() - before_s)
    near.close()
    answerer.join()
    far.close()
    return statistics.median(took_s)
