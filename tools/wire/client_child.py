"""Runs InfiniStore's client for tools.wire.client: takes calls from a socket, sends results or exceptions.

The client blocks forever on some answers, and aborts its process on others; so it has a process of its own.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import infinistore
import numpy as np

from tools.wire.calls import Reply, serve

Blocks = list[tuple[str, int]]


class Peer:
    """The client's methods, with bytes in place of addresses."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.connection: Any = None
        self.buffers: dict[str, Any] = {}

    def connect(self, config: dict[str, Any], asynchronous: bool) -> None:
        """Connects, by ``connect`` or ``connect_async``."""
        self.connection = infinistore.InfinityConnection(infinistore.ClientConfig(**config))
        if asynchronous:
            self.loop.run_until_complete(self.connection.connect_async())
        else:
            self.connection.connect()

    def close(self) -> None:
        """``close``."""
        self.connection.close()

    def tcp_write_cache(self, key: str, value: bytes) -> None:
        """``tcp_write_cache`` with these bytes."""
        data = np.frombuffer(value, dtype=np.uint8)
        self.connection.tcp_write_cache(key, data.ctypes.data, data.nbytes)

    def tcp_read_cache(self, key: str) -> bytes:
        """``tcp_read_cache``."""
        value: bytes = self.connection.tcp_read_cache(key).tobytes()
        return value

    def check_exist(self, key: str) -> bool:
        """``check_exist``."""
        return bool(self.connection.check_exist(key))

    def get_match_last_index(self, keys: list[str]) -> int:
        """``get_match_last_index``."""
        return int(self.connection.get_match_last_index(keys))

    def delete_keys(self, keys: list[str]) -> int:
        """``delete_keys``."""
        return int(self.connection.delete_keys(keys))

    def register_mr(self, name: str, value: bytes) -> int:
        """Makes a buffer and registers it by ``register_mr``."""
        self.buffers[name] = np.frombuffer(value, dtype=np.uint8).copy()
        return int(self.connection.register_mr(self.buffers[name].ctypes.data, self.buffers[name].nbytes))

    def fill(self, name: str, value: bytes) -> None:
        """Sets a registered buffer's bytes."""
        self.buffers[name][:] = np.frombuffer(value, dtype=np.uint8)

    def buffer(self, name: str) -> bytes:
        """Returns a registered buffer's bytes."""
        value: bytes = self.buffers[name].tobytes()
        return value

    def timed(self, op: str, keys: list[str], nbytes: int, start_s: float, limit_s: float) -> tuple[float, list[float]]:
        """Puts or gets these keys in sequence, from ``start_s`` (monotonic) on, for at most ``limit_s``.

        Returns the seconds since ``start_s`` for all of them, and the seconds of each.
        """
        data = np.full(nbytes, (nbytes >> 10) % 251, dtype=np.uint8)
        address, got, took_s = data.ctypes.data, data, []
        time.sleep(max(0.0, start_s - time.monotonic()))
        before_s = time.monotonic()
        for key in keys:
            if op == "put":
                self.connection.tcp_write_cache(key, address, nbytes)
            else:
                got = self.connection.tcp_read_cache(key)
            after_s = time.monotonic()
            took_s.append(after_s - before_s)
            before_s = after_s
            if after_s - start_s > limit_s:
                break
        if not np.array_equal(got, data):
            raise ValueError(f"{keys[len(took_s) - 1]} has wrong bytes")
        return before_s - start_s, took_s

    def rdma_write(self, name: str, requests: list[tuple[Blocks, int]]) -> list[Reply]:
        """``rdma_write_cache_async`` of all requests concurrently: (key and offset) pairs, and the bytes of a block."""
        return self._gather(self.connection.rdma_write_cache_async, name, requests)

    def rdma_read(self, name: str, requests: list[tuple[Blocks, int]]) -> list[Reply]:
        """``rdma_read_cache_async``, in the same way."""
        return self._gather(self.connection.rdma_read_cache_async, name, requests)

    def _gather(
        self, call: Callable[[Blocks, int, int], Awaitable[int]], name: str, requests: list[tuple[Blocks, int]]
    ) -> list[Reply]:
        address = self.buffers[name].ctypes.data

        async def one(blocks: Blocks, block_bytes: int) -> Reply:
            try:
                return True, await call(blocks, block_bytes, address)
            except Exception as error:  # noqa: BLE001 - the caller judges
                return False, (type(error).__name__, str(error))

        async def every() -> list[Reply]:
            return list(await asyncio.gather(*(one(blocks, size) for blocks, size in requests)))

        return self.loop.run_until_complete(every())


if __name__ == "__main__":
    serve(Peer())
