"""The ZMQ sockets of a publisher: PUB for batches, ROUTER for requests of subscribers that missed some."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvdepot.errors import ConfigError, UnavailableError
from kvdepot.publish.replays import Replays, Request
from kvdepot.publish.stream import Batch

END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)
"""Number of the empty batch that ends an answer."""
LINGER_MS = 5000
"""Time limit for sending the last batches at the end."""
KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,
    zmq.TCP_KEEPALIVE_INTVL: 10,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
REQUEST_BYTES_MAX = 64
REQUESTS_PER_TURN = 64
SEQUENCE_BYTES = 8
ANSWER_QUEUE_MESSAGES = 1000
"""Maximum number of messages of an answer that wait in ZMQ; the others wait in ``Replays``."""
TCP = re.compile(r"tcp://(?P<host>\*|\[[0-9a-fA-F:.%]+\]|[^:/\s*\[\]]+):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class Endpoint:
    """An address of ZMQ, and whether the socket binds it or connects to it."""

    address: str
    binds: bool


def endpoint(option: str, address: str, binds: bool = False) -> Endpoint:
    """Returns an endpoint by vLLM's rule: ``*``, ``::`` and ipc are bound, other addresses are connected to.

    Args:
        option: name of the option, for the error.
        address: ``tcp://HOST:PORT`` or ``ipc://PATH``.
        binds: whether other addresses are bound, too.

    Raises:
        ConfigError: it is no such address, or one that cannot be connected to.
    """
    tcp = TCP.fullmatch(address)
    if not (tcp or re.fullmatch(r"ipc://.+", address)):
        raise ConfigError(f"{option}: {address!r} is neither tcp://HOST:PORT nor ipc://PATH, such as tcp://*:5557")
    if tcp and int(tcp["port"]) > 65_535:
        raise ConfigError(f"{option}: {address!r}: a port is at most 65535")
    bound = binds or tcp is None or "*" in address or "::" in address
    if tcp and not bound and not int(tcp["port"]):
        raise ConfigError(f"{option}: {address!r} is connected to, which needs a port; --bind listens on a free one")
    return Endpoint(address, bound)


class Sockets:
    """See the module. One thread uses it."""

    def __init__(self, publish: Endpoint, replay: Endpoint | None, topic: str, queue_batches: int) -> None:
        """Opens the sockets.

        Args:
            publish: where batches are published.
            replay: where requests for missed batches arrive; ``None`` = nowhere.
            topic: first frame of every batch.
            queue_batches: maximum number of batches that wait for a subscriber that does not keep up. It misses the
                others.

        Raises:
            UnavailableError: an address is in use, or is not one of this machine.
        """
        self.queue_batches = queue_batches
        self._topic = topic.encode()
        self._replays: Replays[tuple[bytes, bytes, bytes]] = Replays(lambda message: message[2])
        self.malformed = 0
        """Number of requests that are none."""
        self._replay: zmq.Socket[bytes] | None = None
        self.replay_address: str | None = None
        self._context = zmq.Context()
        try:
            self._publish, self.publish_address = self._open(zmq.PUB, publish, queue_batches)
            if replay is not None:
                self._replay, self.replay_address = self._open(zmq.ROUTER, replay, ANSWER_QUEUE_MESSAGES)
                # Otherwise ZMQ drops what does not fit into a subscriber's queue, silently.
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @property
    def answers_dropped(self) -> int:
        """Number of answers that subscribers did not read."""
        return self._replays.dropped

    def _open(self, kind: int, at: Endpoint, queue_batches: int) -> "tuple[zmq.Socket[bytes], str]":
        socket = self._context.socket(kind)
        try:
            socket.set_hwm(queue_batches)
            # A subscriber whose machine is gone would otherwise keep its queue for hours. ZMQ's own heartbeats are not
            # known to every implementation that routers use.
            for option, value in KEEPALIVE.items():
                socket.setsockopt(option, value)
            socket.setsockopt(zmq.IPV6, int("[" in at.address))
            if kind == zmq.ROUTER:
                socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
            if not at.binds:
                socket.connect(at.address)
                return socket, at.address
            socket.bind(at.address)
            return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            deed = "bind" if at.binds else "connect to"
            raise UnavailableError(f"{at.address}: cannot {deed} it: {error}") from error

    def publish(self, batch: Batch) -> None:
        """Publishes a batch. Never waits: a subscriber whose queue is full misses it."""
        self._publish.send_multipart((self._topic, _number(batch), batch.payload))

    def request(self, admits: Callable[[int], bool], now_s: float) -> Request | None:
        """Returns a request that can be answered now, which ``answer`` must follow; never waits.

        Args:
            admits: returns whether a request for the batches from a number may be answered now.
            now_s: a monotonic time.
        """
        for _ in range(REQUESTS_PER_TURN):
            # Without room, requests wait in ZMQ.
            if self._replay is None or not self._replays.has_room:
                break
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
                self.malformed += 1
            else:
                self._replays.ask(Request(frames[0], int.from_bytes(frames[2], "big")))
        return self._replays.next(admits, now_s)

    def answer(self, request: Request, batches: list[Batch], now_s: float) -> None:
        """Begins an answer, which ``turn`` sends."""
        messages = [(self._topic, _number(batch), batch.payload) for batch in batches]
        self._replays.begin(request.subscriber, [*messages, (b"", END_SEQUENCE, b"")], now_s)

    def turn(self, now_s: float) -> bool:
        """Sends some of the answers. Returns whether anything was sent."""
        replay = self._replay
        if replay is None:
            return False

        def send(subscriber: bytes, message: tuple[bytes, bytes, bytes]) -> bool:
            try:
                replay.send_multipart((subscriber, b"", *message), zmq.NOBLOCK)
            except zmq.Again:
                return False
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                # It is gone: the rest is for nobody.
            return True

        return self._replays.turn(send, now_s)

    def wait(self, seconds: float) -> None:
        """Waits until a request arrives that there is room for, at most this long."""
        if self._replay is not None and self._replays.has_room:
            self._replay.poll(int(seconds * 1000))
        else:
            time.sleep(seconds)

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Closes the sockets. The last batches are sent within ``linger_ms``, or are lost."""
        self._context.destroy(linger=linger_ms)


def _number(batch: Batch) -> bytes:
    return batch.sequence.to_bytes(SEQUENCE_BYTES, "big")
