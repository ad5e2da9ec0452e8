"""InfiniStore's own client, unmodified, in a separate process: if it hangs or aborts, that is an error here."""

import os
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import Pipe
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tools.lab.ports import LOOPBACK
from tools.wire.calls import Reply
from tools.wire.servers import LINK_TYPE, ROOT, Server, preload

CALL_S = 60.0
Blocks = Sequence[tuple[str, int]]


class PeerError(Exception):
    """An exception of the client: its name and text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class PeerHungError(Exception):
    """The client did not return in time; it has been killed."""


class PeerDiedError(Exception):
    """The client's process ended during a call."""


class Peer:
    """One connection of the client to a server."""

    def __init__(
        self, server: Server, *, rdma: bool = False, asynchronous: bool = False, connected: bool = True
    ) -> None:
        here, there = Pipe()
        self._calls = here
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.wire.client_child", str(there.fileno())],
            pass_fds=[there.fileno()],
            cwd=ROOT,
            env={**os.environ, **preload(server.library if rdma else None)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        there.close()
        self.config = {
            "host_addr": LOOPBACK,
            "service_port": server.port,
            "connection_type": "RDMA" if rdma else "TCP",
            "dev_name": server.device or "none",
            "link_type": LINK_TYPE,
            "log_level": "error",
        }
        if connected:
            try:
                self.connect(asynchronous=asynchronous)
            except BaseException:
                self.kill()
                raise

    @property
    def pid(self) -> int:
        """Process id of the client."""
        return self._process.pid

    def call(self, name: str, *arguments: Any, timeout_s: float = CALL_S) -> Any:
        """Calls a method of the client.

        Raises:
            PeerError: the client raised.
            PeerHungError: it did not return in time.
            PeerDiedError: its process ended.
        """
        self.send(name, *arguments)
        return self.receive(name, timeout_s=timeout_s)

    def send(self, name: str, *arguments: Any) -> None:
        """Starts a call."""
        self._calls.send((name, arguments))

    def receive(self, name: str, *, timeout_s: float = CALL_S) -> Any:
        """Returns the result of the call; raises as ``call`` does."""
        if not self._calls.poll(timeout_s):
            self.kill()
            raise PeerHungError(f"{name} did not come back within {timeout_s:.0f} s")
        try:
            done, value = self._calls.recv()
        except (EOFError, ConnectionResetError):
            raise PeerDiedError(f"{name} ended the client with status {self._process.wait(CALL_S)}") from None
        if not done:
            raise PeerError(*value)
        return value

    def connect(self, *, asynchronous: bool = False) -> None:
        """Connects again, or for the first time."""
        self.call("connect", self.config, asynchronous)

    def put(self, key: str, value: bytes, **limits: float) -> None:
        """``tcp_write_cache``."""
        self.call("tcp_write_cache", key, value, **limits)

    def get(self, key: str, **limits: float) -> bytes:
        """``tcp_read_cache``."""
        value: bytes = self.call("tcp_read_cache", key, **limits)
        return value

    def exists(self, key: str) -> bool:
        """``check_exist``."""
        return bool(self.call("check_exist", key))

    def match(self, keys: list[str]) -> int:
        """``get_match_last_index``."""
        return int(self.call("get_match_last_index", keys))

    def delete(self, keys: list[str]) -> int:
        """``delete_keys``."""
        return int(self.call("delete_keys", keys))

    def register(self, name: str, value: bytes) -> None:
        """Registers a buffer with these bytes."""
        self.call("register_mr", name, value)

    def buffer(self, name: str) -> bytes:
        """Returns a registered buffer's current bytes."""
        value: bytes = self.call("buffer", name)
        return value

    def rdma_write(self, name: str, requests: Sequence[tuple[Blocks, int]]) -> list[Reply]:
        """Writes from a registered buffer, all requests concurrently; each answer is (done, code or error)."""
        replies: list[Reply] = self.call("rdma_write", name, list(requests))
        return replies

    def rdma_read(self, name: str, requests: Sequence[tuple[Blocks, int]]) -> list[Reply]:
        """Reads to a registered buffer, in the same way."""
        replies: list[Reply] = self.call("rdma_read", name, list(requests))
        return replies

    def kill(self) -> None:
        """Kills it like kill -9."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends the process."""
        self._calls.close()
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
