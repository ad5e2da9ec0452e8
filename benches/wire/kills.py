"""kill -9 of the server or of a client, again and again, under load: no wrong byte, all go on, nothing is left over.

Run as ``-m benches.wire.kills`` by the interpreter of .venv-infinistore. Half of the clients are InfiniStore's own.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.lab.child import ChildError
from tools.wire.frames import FINISH, ClosedError, Raw
from tools.wire.load_child import CLIENTS, KEYS
from tools.wire.servers import KINDS, ROOT, NoServerError, Server, preload

CLIENT_COUNT = 4
MIB = 1 << 20
SERVER_SHARE = 0.4
# Maximum number of operations of all clients between two kills.
MOST_BETWEEN = 300
GO_ON_S = 60.0
POLL_S = 0.01
WORDS = 2000
FILL_BYTES = 16 * MIB
# For a pool of 1 GiB, which InfiniStore's server evicts from at 95 %.
FILL_COUNT = 52


@dataclass
class Outcome:
    """Actions and findings."""

    seed: int
    server_kills: int = 0
    client_kills: int = 0
    # InfiniStore's client dies when its server disappears during a get; no server could prevent that.
    peer_clients_died: int = 0
    operations: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Worker:
    """A client under load."""

    def __init__(self, server: Server, client: str, seed: int, report: Path) -> None:
        self.client = client
        self.report = report
        self._errors = report.with_suffix(".err")
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.wire.load_child", str(server.port), client, str(seed), str(report)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **preload(None)},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )

    def counts(self) -> Counter[str]:
        """Returns its last report."""
        # A kill may truncate the last line.
        lines = self.report.read_text().split("\n")[:-1] if self.report.exists() else []
        return Counter(json.loads(lines[-1])) if lines else Counter()

    def last_words(self) -> str:
        """Returns the end of its standard error."""
        return self._errors.read_text(errors="replace")[-WORDS:]

    def ended(self) -> int | None:
        """Returns its status if it has ended on its own."""
        return self._process.poll()

    def kill(self) -> None:
        """Kills it like kill -9."""
        self._process.kill()
        self._process.wait()


class Run:
    """A server, its clients, and the kills."""

    def __init__(self, server: Server, root: Path, seed: int) -> None:
        self.server, self.root = server, root
        self.rng = random.Random(seed)
        self.outcome = Outcome(seed)
        self.past: Counter[str] = Counter()
        self.started = 0
        self.workers = [self._worker(number) for number in range(CLIENT_COUNT)]

    def _worker(self, number: int) -> Worker:
        self.started += 1
        client = sorted(CLIENTS)[number % len(CLIENTS)]
        return Worker(self.server, client, self.rng.randrange(1 << 30), self.root / f"client-{self.started}.jsonl")

    def total(self) -> Counter[str]:
        """Returns the counts of all clients so far."""
        return sum((worker.counts() for worker in self.workers), self.past.copy())

    def wait(self, what: str, holds: Callable[[], bool]) -> None:
        """Waits until the condition holds; a finding if it does not."""
        end_s = time.monotonic() + GO_ON_S
        while not holds():
            if time.monotonic() > end_s:
                self.outcome.faults.append(f"{what}: not within {GO_ON_S:.0f} s")
                return
            time.sleep(POLL_S)

    def _done(self) -> int:
        total = self.total()
        return total["puts"] + total["hits"] + total["misses"]

    def step(self) -> None:
        """Lets the load run, kills once, and waits until all go on."""
        aim = self._done() + self.rng.randrange(MOST_BETWEEN)
        self.wait("clients under load", lambda: self._done() >= aim)
        server_killed = False
        if not self.server.alive:
            self.outcome.faults.append(f"the server died by itself\n{self.server.tail()}")
            self.server.restart()
        elif self.rng.random() < SERVER_SHARE:
            server_killed = True
            self.outcome.server_kills += 1
            self.server.kill()
            self.server.restart()
        else:
            self.outcome.client_kills += 1
            number = self.rng.randrange(CLIENT_COUNT)
            self.workers[number].kill()
            self._replace(number)
        before = [worker.counts() for worker in self.workers]

        def all_go_on() -> bool:
            # A client may notice late that its server was killed.
            for number in self._replace_dead(server_killed=server_killed):
                before[number] = Counter()
            return all(
                worker.counts()["puts"] > counts["puts"] for worker, counts in zip(self.workers, before, strict=True)
            )

        self.wait("all clients go on", all_go_on)

    def _replace_dead(self, *, server_killed: bool) -> list[int]:
        """Replaces clients that have ended; a finding unless the server's end explains it. Returns their numbers."""
        dead = [number for number, worker in enumerate(self.workers) if worker.ended() is not None]
        for number in dead:
            worker = self.workers[number]
            if worker.client == "infinistore" and server_killed:
                self.outcome.peer_clients_died += 1
            else:
                self.outcome.faults.append(f"a client ended with status {worker.ended()}\n{worker.last_words()}")
            self._replace(number)
        return dead

    def _replace(self, number: int) -> None:
        self.past += self.workers[number].counts()
        self.workers[number] = self._worker(number)

    def end_load(self) -> None:
        """Kills all clients."""
        for worker in self.workers:
            worker.kill()

    def end(self, files_at_first: int) -> Outcome:
        """Ends the load, and looks for leftovers."""
        self.end_load()
        self.outcome.operations = dict(self.total())
        faults = self.outcome.faults
        if self.outcome.operations.get("wrong"):
            faults.append(f"{self.outcome.operations['wrong']} values with wrong bytes")
        self.wait("files of ended connections closed", lambda: self.server.open_files() <= files_at_first)
        with Raw(self.server.port) as raw:
            held = sum(raw.exists(f"load-{key}".encode()) for key in range(KEYS))
            if held != self.server.kvmap_len():
                faults.append(f"{self.server.kvmap_len()} keys are counted, {held} are there")
            # Space that a dead client announced is free again: the complete pool takes values, and keeps them.
            self.server.purge()
            refused = sum(raw.put(f"fill-{i}", bytes([i]) * FILL_BYTES) != FINISH for i in range(FILL_COUNT))
            kept = sum(raw.get(f"fill-{i}") == bytes([i]) * FILL_BYTES for i in range(FILL_COUNT))
            if refused or kept < FILL_COUNT:
                faults.append(f"of {FILL_COUNT} values that fit, {refused} were refused and {kept} were kept")
        return self.outcome


def kills(kind: str, count: int, seed: int, root: Path) -> Outcome:
    """Kills a server of that kind, or its clients, ``count`` times."""
    with ExitStack() as stack:
        server = stack.enter_context(Server(kind, keep_log=root / "server.log"))
        files_at_first = server.open_files()
        run = Run(server, root, seed)
        stack.callback(run.end_load)
        try:
            for _ in range(count):
                run.step()
            return run.end(files_at_first)
        except (ChildError, OSError, ClosedError) as error:
            run.outcome.faults.append(f"the server is gone: {error}")
            return run.outcome


def main() -> None:
    """Runs it; fails when anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", choices=KINDS, default=KINDS[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="kvdepot-kills-") as root:
            outcome = kills(arguments.server, arguments.kills, arguments.seed, Path(root))
    except NoServerError as error:
        parser.exit(2, f"{error}\n")
    if arguments.json:
        print(json.dumps(asdict(outcome), indent=2))
    else:
        print(f"seed {outcome.seed}: {outcome.server_kills} server kills, {outcome.client_kills} client kills")
        print(", ".join(f"{name} {count}" for name, count in outcome.operations.items()))
        print("\n".join(outcome.faults) or "no fault")
    sys.exit(bool(outcome.faults))


if __name__ == "__main__":
    main()
