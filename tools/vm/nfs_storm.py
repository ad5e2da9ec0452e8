"""Two depots on two nodes share one cap (``posix_capacity_shared``) on a mount, and are killed over and over.

Runs in the virtual machine of ``tools/vm/nfs.sh``. Each node has a depot and an engine that loads and dumps, as
processes in its own network namespace; nothing stays in their pools. Every byte that is loaded is compared. Meanwhile
``shared_storm`` measures, ten times in a second, what lies at the server. At the end, what the dead left behind becomes
older than an hour.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvdepot
from tools.vm.nfs_depot import LONG_S, expect, names, say, until

BLOCK_BYTES = 65_536
FILE_BYTES = BLOCK_BYTES + 4096
CAP_BLOCKS = 32
WORKING_SET = 10 * CAP_BLOCKS
BATCH = 4
ORPHAN_AGE_S = 3700
NAMESPACE = {"model": "storm", "dtype": "uint8"}


def config(name: str, directory: Path) -> dict[str, Any]:
    """Returns a node's configuration."""
    return {
        "mode": "node",
        "socket": f"/run/storm-{name}.sock",
        "pipeline": "Staging|Posix",
        "directories": [str(directory)],
        "pool_slots": 16,
        "posix_capacity_gb": CAP_BLOCKS * FILE_BYTES / (1 << 30),
        "posix_capacity_shared": True,
        "io_write_threads": 1,
        "log_level": "error",
        "attach_timeout_ms": 60_000,
        "timeout_ms": 30_000,
    }


def block(number: int) -> list[npt.NDArray[np.uint8]]:
    """Returns a block's bytes."""
    return [np.random.default_rng(number).integers(0, 256, size=BLOCK_BYTES, dtype=np.uint8)]


def work(name: str, directory: Path) -> None:
    """Loads and dumps until it is killed, as an engine of one node; says what it has done."""
    layout = kvdepot.BlockLayout(shards=1, tensor_sizes_bytes=[BLOCK_BYTES])
    store = kvdepot.open(config(name, directory), layout=layout, namespace=NAMESPACE)
    found = 0
    while True:
        # Every second time blocks of which half may be there, so that some are found.
        numbers = random.sample(range(random.choice((WORKING_SET, CAP_BLOCKS))), BATCH)
        rows = [[np.zeros(BLOCK_BYTES, dtype=np.uint8)] for _ in numbers]
        failed = set(store.load(names(numbers), rows).wait().failed.tolist())
        for row, number in enumerate(numbers):
            if row not in failed and not np.array_equal(rows[row][0], block(number)[0]):
                say(f"wrong block {number}")
        found += len(numbers) - len(failed)
        missing = [numbers[row] for row in failed]
        if missing:
            store.dump(names(missing), [block(number) for number in missing]).wait()
        depot = store.stats().get("depot")
        if depot is None:
            continue  # none answers now
        (tier,) = depot["tiers"]
        did = {"pid": depot["pid"], "found": found, "wrote": tier["writes"]["blocks"], "depots": tier["shared_depots"]}
        say(json.dumps(did))


@dataclass
class Node:
    """One node, and what its processes have done so far."""

    name: str
    directory: Path
    runner: str

    def __post_init__(self) -> None:
        self.said: dict[str, int] = {}
        self.start()

    def start(self) -> None:
        """Starts an engine, which starts its depot."""
        command = [self.runner, sys.executable, "-m", "tools.vm.nfs_storm", "--work", self.name, str(self.directory)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.lines = self._lines()

    def _lines(self) -> Iterator[dict[str, int]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("wrong"):
                sys.exit(f"FAILED: {self.name}: {line}")
            if line.startswith("{"):
                yield json.loads(line)

    def listen(self, **wanted: int) -> None:
        """Waits until the node has done so much."""
        for said in self.lines:
            self.said = said
            if all(said[what] >= much for what, much in wanted.items()):
                return
        sys.exit(f"FAILED: {self.name}: an engine ended by itself: {self.process.wait()}")

    def kill(self) -> None:
        """Kills the depot, in the middle of its work, and then its engine."""
        os.kill(self.said["pid"], signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for said in self.lines:
            self.said = said
        until("a depot is dead", lambda: not Path(f"/proc/{self.said['pid']}").exists())


def leftovers(directory: Path) -> list[Path]:
    """Returns files that no depot serves or needs."""
    return [path for path in directory.rglob(".*") if path.name.startswith((".tmp-", ".probe-", ".nfs"))]


def main() -> None:
    """Runs the storm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs=2, metavar=("NAME", "DIRECTORY"), help="be an engine of a node")
    parser.add_argument("--server", type=Path, help="the directory of the mounts at the server")
    parser.add_argument("--sampler", help="the tests that measure")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("nodes", nargs="*", help="MOUNT:COMMAND of two nodes; the command runs a program there")
    options = parser.parse_args()
    if options.work is not None:
        work(options.work[0], Path(options.work[1]))
    began = time.monotonic()
    server = options.server / "storm"
    server.mkdir()
    nodes = []
    sampler = subprocess.Popen(
        [options.sampler, "sampler", "--exact", "--nocapture"],
        env={**os.environ, "KVDEPOT_TEST_STORM_SAMPLED": str(server)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    for name, text in zip("ab", options.nodes, strict=True):
        mount, runner = text.split(":")
        directory = Path(mount) / "storm"
        until("a mount has the directory", directory.is_dir)
        nodes.append(Node(name, directory, runner))
    for node in nodes:
        node.listen(wrote=CAP_BLOCKS // 2, depots=2)
        # While the engines stand still, another program comes to its turn.
        node.process.send_signal(signal.SIGSTOP)
    command = [nodes[0].runner, sys.executable, "-m", "kvdepot", "gc", "--dry-run", "--json", str(nodes[0].directory)]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=LONG_S).stdout)
    expect("gc names the depots of both nodes", sorted(one["here"] for one in told["depots"]), [False, True])
    expect("gc knows their capacity", told["capacity_bytes"] // FILE_BYTES, CAP_BLOCKS)
    for node in nodes:
        node.process.send_signal(signal.SIGCONT)
    found = wrote = 0
    for kill in range(options.kills):
        node = nodes[kill % 2]
        node.listen(found=2 + kill % 3, wrote=2 + kill % 3)
        node.kill()
        found, wrote = found + node.said["found"], wrote + node.said["wrote"]
        node.start()
    for node in nodes:
        node.listen(found=1, wrote=1)
        node.kill()
    say(f"{options.kills} kills of depots, {found} blocks found, {wrote} written")
    left = leftovers(server)
    for path in left:
        old = time.time() - ORPHAN_AGE_S
        os.utime(path, (old, old))
    nodes[1].start()
    until("what was left is removed", lambda: not set(left) & set(leftovers(server)))
    say(f"left behind, and removed after an hour: {len(left)}")
    nodes[1].listen(found=1)
    nodes[1].kill()
    samples, most, taken = map(int, sampler.communicate()[0].split("sampled ")[1].split()[:3])
    say(f"{samples} samples, at most {most} bytes by name and {taken} on the disk of {CAP_BLOCKS * FILE_BYTES}")
    if not CAP_BLOCKS * FILE_BYTES // 2 < most <= CAP_BLOCKS * FILE_BYTES:
        sys.exit("FAILED: the cap is used, and kept")
    say(f"storm: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
