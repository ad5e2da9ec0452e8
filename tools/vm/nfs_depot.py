"""Depots on mounts of an NFS server that stops and comes back: their pools go on, what lies on the server is a miss.

Runs in the virtual machine of ``tools/vm/nfs.sh``, which mounts one export twice and passes the two mounts, the first
one ``hard``, the second one ``soft``, and the commands that stop and start the server. Without these commands only the
seed's file is tried.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvdepot

Block = list[npt.NDArray[np.uint8]]

LAYOUT = kvdepot.BlockLayout(shards=2, tensor_sizes_bytes=[16384])
NAMESPACE = {"model": "nfs", "dtype": "uint8"}
TIMEOUT_MS = 2000
CALL_S = 30.0
"""Seconds that a call may take: the depot's timeout, and the patience that an emulated processor needs."""
LONG_S = 240.0
"""Only a hang takes so long: a client of NFS repeats a request after a minute."""

SEED = """\
ucm_connectors:
  - ucm_connector_name: "UcmNfsStore"
    ucm_connector_config:
      storage_backends: "{}"
      io_direct: false
"""


def names(numbers: Sequence[int]) -> list[bytes]:
    """Returns the hashes of blocks."""
    return [b"block" + number.to_bytes(4, "big") for number in numbers]


def blocks(numbers: Sequence[int]) -> list[Block]:
    """Returns the bytes of blocks, each different."""
    made = []
    for number in numbers:
        generator = np.random.default_rng(number)
        made.append([generator.integers(0, 256, size=16384, dtype=np.uint8) for _ in range(2)])
    return made


def say(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)


def until(what: str, done: Callable[[], bool], limit_s: float = LONG_S) -> float:
    """Waits for what other processes do; returns the seconds it took."""
    start = time.monotonic()
    while not done():
        if time.monotonic() - start > limit_s:
            sys.exit(f"FAILED: {what}: not after {limit_s:.0f} s")
        time.sleep(0.2)
    return time.monotonic() - start


@dataclass(frozen=True)
class Part:
    """What one node stores, and what it finds on the server because the other one stored it."""

    own: range
    before: range
    after: range


PARTS = (Part(range(8), range(8, 10), range(10, 16)), Part(range(8, 16), range(2), range(2, 8)))


class Node:
    """A depot on one mount, and a store attached to it."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.config: dict[str, Any] = {
            "mode": "node",
            "socket": f"/run/depot-{name}.sock",
            "pipeline": "Cache|Posix",
            "directories": [str(directory)],
            "pool_gb": 0.0625,
            "log_level": "warn",
            "attach_timeout_ms": 60_000,
            "timeout_ms": TIMEOUT_MS,
            "call_timeout_ms": 2_000,
        }
        self.store = kvdepot.open(self.config, layout=LAYOUT, namespace=NAMESPACE)

    @property
    def pid(self) -> int:
        """The depot's process."""
        pid: int = self.store.stats()["depot"]["pid"]
        return pid

    def dump(self, numbers: Sequence[int]) -> bool:
        """Stores blocks in the pool; the tier gets them later. Returns whether all of them were stored."""
        start = time.monotonic()
        result = self.store.dump(names(numbers), blocks(numbers)).wait()
        self._in_time("dump", start)
        return result.ok

    def load(self, numbers: Sequence[int]) -> int:
        """Loads blocks; returns how many were hits, whose bytes it compares."""
        start = time.monotonic()
        found = [[np.zeros_like(tensor) for tensor in block] for block in blocks(numbers)]
        result = self.store.load(names(numbers), found).wait()
        failed = set(result.failed.tolist())
        for row, (got, expected) in enumerate(zip(found, blocks(numbers), strict=True)):
            if row not in failed and not all(map(np.array_equal, got, expected)):
                sys.exit(f"FAILED: {self.name}: block {numbers[row]} came back with other bytes")
        self._in_time("load", start)
        return len(numbers) - len(failed)

    def has(self, numbers: Sequence[int]) -> bool:
        """Returns whether it loads all of these blocks."""
        return self.load(numbers) == len(numbers)

    def lookup(self, numbers: Sequence[int]) -> int:
        """Returns how many blocks are found."""
        start = time.monotonic()
        found = int(self.store.lookup(names(numbers)).sum())
        self._in_time("lookup", start)
        return found

    def _in_time(self, call: str, start: float) -> None:
        seconds = time.monotonic() - start
        if seconds > CALL_S:
            sys.exit(f"FAILED: {self.name}: a {call} took {seconds:.1f} s")


def expect(what: str, got: object, wanted: object) -> None:
    """Fails unless both are equal."""
    if got != wanted:
        sys.exit(f"FAILED: {what}: {got} instead of {wanted}")


def seed_pipeline(directory: Path) -> None:
    """The seed's ``UcmNfsStore`` stores blocks on the mount, and another process's store finds them."""
    directory.mkdir()
    file = Path("/run/ucm.yaml")
    file.write_text(SEED.format(directory))
    numbers = range(100, 106)
    for turn in range(2):
        with kvdepot.open(str(file), layout=LAYOUT, namespace=NAMESPACE) as store:
            expect("the seed's pipeline", store.config.pipeline, "Staging|Posix")
            if turn == 0:
                store.dump(names(numbers), blocks(numbers)).wait().raise_for_failures()
                expect("the seed's blocks are written", store.drain(60_000), True)
            found = [[np.zeros_like(tensor) for tensor in block] for block in blocks(numbers)]
            expect("the seed's blocks are found", store.lookup_on_prefix(names(numbers)), len(numbers))
            store.load(names(numbers), found).wait().raise_for_failures()
            for got, wanted in zip(found, blocks(numbers), strict=True):
                expect("the seed's bytes", all(map(np.array_equal, got, wanted)), True)
    files = len(list(directory.rglob("*.kvb")))
    expect("the seed's files", files, len(numbers))
    say(f"seed UcmNfsStore: {files} blocks dumped, found by another store, and loaded")


def serve_through_an_outage(nodes: list[Node], stop: str, start: str, outage_s: float) -> None:
    """Each node has some blocks in its pool, and the other's blocks only on the server."""
    for node, part in zip(nodes, PARTS, strict=True):
        until(f"{node.name}: blocks are stored", partial(node.dump, part.own))
        expect(f"{node.name}: blocks are written", node.store.drain(60_000), True)
    for node, part in zip(nodes, PARTS, strict=True):
        until(f"{node.name}: the other node's blocks are hits", partial(node.has, part.before))
    subprocess.run(stop, shell=True, check=True)
    stopped = time.monotonic()
    rounds = 0
    while rounds < 2 or time.monotonic() - stopped < outage_s:
        for node, part in zip(nodes, PARTS, strict=True):
            # Repeated, because a busy machine may not run the depot for as long as a load may take.
            until(f"{node.name}: pool hits without the server", partial(node.has, part.own))
            node.lookup(part.after)
            expect(f"{node.name}: loads of what lies on the server", node.load(part.after), 0)
            until(f"{node.name}: pool hits after misses", partial(node.has, part.own))
            new = range(1000 + 4 * rounds, 1004 + 4 * rounds)
            until(f"{node.name}: the pool takes blocks", partial(node.dump, new))
        rounds += 1
    seconds = time.monotonic() - stopped
    subprocess.run(start, shell=True, check=True)
    started = time.monotonic()
    say(f"server stopped for {seconds:.0f} s: {rounds} rounds of pool hits, misses and dumps on both mounts")
    for node, part in zip(nodes, PARTS, strict=True):
        until(f"{node.name}: the tier comes back by itself", partial(node.has, part.after))
        say(f"{node.name}: blocks on the server are hits again {time.monotonic() - started:.1f} s after its start")
    for node, other, first in zip(nodes, nodes[::-1], (50, 60), strict=True):
        numbers = range(first, first + 4)
        until(f"{node.name}: blocks are stored again", partial(node.dump, numbers))
        until(f"{node.name}: writes go on", partial(node.store.drain, 5_000))
        until(f"{other.name}: finds them", partial(other.has, numbers))


def stop_and_start_without_the_server(node: Node, stop: str, start: str) -> None:
    """A depot whose mount hangs ends when it is told to; one that starts there costs its engine no more than a wait."""
    file = Path(f"/run/{node.name}.yaml")
    file.write_text("".join(f"{key}: {value}\n" for key, value in node.config.items()))
    subprocess.run(stop, shell=True, check=True)
    node.load(range(200, 204))
    pid = node.pid
    node.store.close()
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "kvdepot", "stop", "--config", str(file)], check=False, timeout=LONG_S)
    until("a depot ends though its mount hangs", lambda: not Path(f"/proc/{pid}").exists())
    say(f"{node.name}: a depot stopped after {time.monotonic() - began:.1f} s")
    began = time.monotonic()
    config = {**node.config, "attach_timeout_ms": 5_000}
    store = kvdepot.open(config, layout=LAYOUT, namespace=NAMESPACE)
    found = [[np.zeros_like(tensor) for tensor in block] for block in blocks(range(2))]
    failed = len(store.load(names(range(2)), found).wait().failed)
    seconds = time.monotonic() - began
    say(f"{node.name}: opened without the server in {seconds:.1f} s, attached {store.attached}, {failed} of 2 misses")
    expect(f"{node.name}: misses without the server", failed, 2)
    if seconds > 2 * CALL_S:
        sys.exit(f"FAILED: {node.name}: a store opened after {seconds:.0f} s")
    subprocess.run(start, shell=True, check=True)
    found = [[np.zeros_like(tensor) for tensor in block] for block in blocks(range(2))]
    took = until("a depot serves once its server is back", lambda: store.load(names(range(2)), found).wait().ok)
    expect("its bytes", all(np.array_equal(a, b) for a, b in zip(found[1], blocks([1])[0], strict=True)), True)
    say(f"{node.name}: served {took:.1f} s after the server came back")
    os.kill(store.stats()["depot"]["pid"], signal.SIGKILL)
    store.close()


def main() -> None:
    """Runs all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stop", default="", help="command that stops the server")
    parser.add_argument("--start", default="", help="command that starts it")
    parser.add_argument("--outage-s", type=float, default=20.0)
    parser.add_argument("mounts", nargs=2, type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    shared = options.mounts[0] / "depot"
    shared.mkdir()
    until("the other mount sees a new directory", (options.mounts[1] / "depot").is_dir)
    seed_pipeline(options.mounts[0] / "seed")
    if not options.stop:
        return
    nodes = [Node(name, mount / "depot") for name, mount in zip(("hard", "soft"), options.mounts, strict=True)]
    serve_through_an_outage(nodes, options.stop, options.start, options.outage_s)
    os.kill(nodes[1].pid, signal.SIGKILL)
    nodes[1].store.close()
    stop_and_start_without_the_server(nodes[0], options.stop, options.start)
    say(f"depots: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
