"""Depots above a real S3 server: served from its bucket, and through its failures."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvdepot
from tools.lab.depot import Depot, DepotHome
from tools.lab.s3_front import SLOW_DOWN
from tools.lab.s3_server import Server

MIB = 1 << 20
BLOCKS = "/kv/blocks/"
PATIENCE_S = 100.0
# A hang must reach it, and a busy machine must not.
TASK_MS = 20_000
# Silence of a server that is alive: one that was killed breaks its connections.
SILENCE_MS = 60_000


def block(n: int, size: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, size, dtype=np.uint8)


class Client:
    """A store of a depot, and blocks that are known by their numbers."""

    def __init__(self, home: DepotHome, size: int) -> None:
        config = {
            "mode": "node",
            "socket": str(home.socket),
            "start_depot": False,
            "attach_timeout_ms": 60_000,
            "timeout_ms": TASK_MS,
            "call_timeout_ms": 30_000,
        }
        self.size = size
        self._store = kvdepot.open(config, layout=[size], namespace={"model": "s3"})

    def dump(self, numbers: range) -> int:
        """Stores blocks, and returns how many were taken."""
        task = self._store.dump([self._hash(n) for n in numbers], [[block(n, self.size)] for n in numbers])
        return len(numbers) - len(task.wait().failed)

    def load(self, numbers: range) -> int:
        """Loads blocks, and returns how many came. Those have the right bytes (P1)."""
        into = [np.zeros(self.size, dtype=np.uint8) for _ in numbers]
        failed = set(self._store.load([self._hash(n) for n in numbers], [[one] for one in into]).wait().failed)
        came = [at for at in range(len(numbers)) if at not in failed]
        assert all((into[at] == block(numbers[at], self.size)).all() for at in came)
        return len(came)

    def found(self, numbers: range) -> int:
        """How many of the first blocks a lookup finds."""
        return self._store.lookup_on_prefix([self._hash(n) for n in numbers])

    @staticmethod
    def _hash(n: int) -> bytes:
        return n.to_bytes(16, "big")

    def close(self) -> None:
        self._store.close()


@contextmanager
def attached(home: DepotHome, size: int) -> Iterator[tuple[Depot, Client]]:
    """A depot's process and a client; the process is killed in the end."""
    with home.start() as depot:
        client = Client(home, size)
        try:
            yield depot, client
        finally:
            client.close()


def until(what: str, is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, what
        time.sleep(0.01)


def home(root: Path, server: Server, pipeline: str, **values: Any) -> DepotHome:
    """A depot, which packs no blocks unless the caller says so: requests are counted by block."""
    usual = {"pool_gb": 0.0625, "timeout_ms": TASK_MS, "object_pack_mb": 0, "object_timeout_ms": SILENCE_MS}
    options = {"pipeline": pipeline, **usual, **server.options(), **values}
    if "Posix" in pipeline:
        options["posix_capacity_gb"] = 0.1
    else:
        options["directories"] = None
    return DepotHome(root, options)


def test_a_depot_on_an_empty_disk_serves_from_the_bucket(server: Server, tmp_path: Path) -> None:
    """And asks it once for each block: what came is on the disk, and in the pool."""
    size, all_blocks = 200_000, range(12)
    with home(tmp_path / "one", server, "Cache|Posix|Object") as first, attached(first, size) as (depot, client):
        assert client.dump(all_blocks) == 12
        depot.wait_until_clean(PATIENCE_S)
        assert server.front.served("PUT", BLOCKS) == 12
        assert client.load(all_blocks) == 12
        assert server.front.served("GET", BLOCKS) == 0, "the pool has them"

    front, promote = server.front, {"posix_promote": True}
    with home(tmp_path / "two", server, "Cache|Posix|Object", **promote) as second:
        with attached(second, size) as (depot, client):
            assert client.found(range(20)) == 12
            assert client.load(all_blocks) == 12
            assert front.served("GET", BLOCKS) == 12
            assert (client.found(all_blocks), client.load(all_blocks)) == (12, 12)
            assert front.served("GET", BLOCKS) == 12, "the pool has them"
            depot.wait_until_clean(PATIENCE_S)
        with attached(second, size) as (_, client):
            assert (client.found(all_blocks), client.load(all_blocks)) == (12, 12)
    assert front.served("GET", BLOCKS) == 12, "the disk has them"
    assert front.served("HEAD", BLOCKS) <= 20, "it asks about a block once, and about some behind the first miss"
    assert front.served("PUT", BLOCKS) == 12, "nothing is stored twice"


def test_small_blocks_cost_one_request_for_many(server: Server, tmp_path: Path) -> None:
    """Of a dump, and of a hit of a depot that never saw the blocks; also after the server was killed."""
    size, all_blocks, front = 256 << 10, range(96), server.front
    packs: dict[str, Any] = {"object_pack_mb": 8}
    with home(tmp_path / "one", server, "Cache|Object", **packs) as first, attached(first, size) as (depot, client):
        assert client.dump(all_blocks) == 96
        depot.wait_until_clean(PATIENCE_S)
        # Three packs, unless the machine was too busy to bring the blocks in time.
        assert 3 <= front.served("PUT", BLOCKS) <= 48
    with home(tmp_path / "two", server, "Cache|Object", **packs) as second, attached(second, size) as (_, client):
        # What its first list has not told yet, a later lookup finds.
        until("the packs are known", lambda: client.found(all_blocks) == 96)
        before = front.served("GET", BLOCKS)
        assert client.load(all_blocks) == 96
        assert front.served("GET", BLOCKS) - before <= 48
        server.kill()
        server.start()
    with home(tmp_path / "three", server, "Cache|Object", **packs) as third, attached(third, size) as (_, client):
        until("the packs are known", lambda: client.found(all_blocks) == 96)
        assert client.load(all_blocks) == 96


def test_wrong_keys_are_a_miss_that_says_why(server: Server, tmp_path: Path) -> None:
    options = server.options(secret="not-the-key")
    with home(tmp_path / "one", server, "Cache|Object", **options) as node, node.start() as depot:
        client = Client(node, 4096)
        try:
            assert (client.found(range(2)), client.load(range(2))) == (0, 0)
            until("the depot says why", lambda: "SignatureDoesNotMatch" in depot.log.read_text())
            assert "not-the-key" not in depot.log.read_text()
        finally:
            client.close()
    assert server.front.served("GET", BLOCKS) == 0


# Loads all blocks and stores others. Returns how many blocks came.
Traffic = Callable[[], int]


def die(server: Server, traffic: Traffic, blocks: int) -> None:
    """Kills the server amid traffic, and restarts it after some more."""
    before = server.front.served("GET", BLOCKS)
    with ThreadPoolExecutor(1) as pool:
        amid = pool.submit(traffic)
        until("blocks are read", lambda: server.front.served("GET", BLOCKS) >= before + 5)
        server.kill()
        amid.result()
    assert traffic() < blocks, "the pool has no room for all"
    server.start()


def refuse_half(server: Server, traffic: Traffic, blocks: int) -> None:
    """Answers every other request with an error."""
    count = 0

    def plan(method: str, path: str) -> int | None:
        nonlocal count
        count += BLOCKS in path
        return [None, SLOW_DOWN, None, 500][count % 4] if BLOCKS in path else None

    server.front.plan = plan
    traffic()
    assert server.front.refused > 0
    server.front.plan = None


@pytest.mark.timeout(600)  # each wait has a limit of its own
@pytest.mark.parametrize("fail", [die, refuse_half], ids=["killed", "throttled"])
def test_failures_amid_traffic_cost_misses_only(
    server: Server, tmp_path: Path, fail: Callable[[Server, Traffic, int], None]
) -> None:
    """No wrong byte; every task ends; the depot uses the bucket again by itself. Its pool holds only some blocks."""
    kept = [range(at, at + 20) for at in range(0, 80, 20)]
    with home(tmp_path / "one", server, "Cache|Object") as node, attached(node, MIB) as (depot, client):
        for some in kept:
            assert client.dump(some) == len(some)
            depot.wait_until_clean(PATIENCE_S)
        new: list[range] = []

        def traffic() -> int:
            came = 0
            for some in kept:
                came += client.load(some)
                new.append(range(1000 + len(new) * 4, 1004 + len(new) * 4))
                client.dump(new[-1])
            return came

        for _ in range(2):
            fail(server, traffic, 80)
            for some in kept:
                until("the blocks are back", lambda some=some: client.load(some) == len(some))
        depot.wait_until_clean(PATIENCE_S)
    with home(tmp_path / "two", server, "Cache|Object") as node, attached(node, MIB) as (_, client):
        assert all(client.load(some) == len(some) for some in kept)
        for some in new:
            client.load(some)
