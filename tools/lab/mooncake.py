"""Mooncake's own master and a holder of its memory, as processes that can be killed and started again."""

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tools.lab.child import POLL_S, Child, ChildError
from tools.lab.ports import LOOPBACK, free_port
from tools.lab.rounds import Rounds

START_S = 120.0
STARTS = 20
SEGMENT_BYTES = 256 << 20
LISTENING = "0A"
HOLDER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
while store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1]) != 0:
    time.sleep(0.2)
for _ in sys.stdin:
    print("ROUND {}", flush=True)
"""
MASTER_OPTIONS = (
    f"--rpc_address={LOOPBACK}",
    f"--metrics_host={LOOPBACK}",
    # A removal waits for the leases of readers. A shorter one ends amid a slow read.
    "--default_kv_lease_ttl=20000",
    # So long a dead holder counts as alive. The memory of one that the machine does not run for longer is forgotten.
    "--client_ttl=15",
)


class Mooncake:
    """A running store: a master and one holder of memory, which end with the ``with`` block."""

    def __init__(self, environment: Path, home: Path) -> None:
        """Starts it; ``environment`` has Mooncake's package, and logs and configuration are put into ``home``."""
        self.config = home / "mooncake.json"
        self.python = environment / "bin" / "python"
        self._command = environment / "bin" / "mooncake_master"
        self._home = home
        # Mooncake's package is linked with libibverbs, which the environment has.
        paths = [str(environment / "lib-verbs"), os.environ.get("LD_LIBRARY_PATH", "")]
        self._environ = {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}
        self._holder: Rounds | None = None
        self._master = self._first_master()
        try:
            self.start_holder()
        except BaseException:
            self.close()
            raise
        client = {
            "local_hostname": LOOPBACK,
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": self.address,
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 0,
            "local_buffer_size": "16mb",
        }
        self.config.write_text(json.dumps(client))

    @property
    def address(self) -> str:
        """Address of the master."""
        return f"{LOOPBACK}:{self._port}"

    def options(self) -> dict[str, Any]:
        """What a configuration says to use it."""
        return {"mooncake_config_path": str(self.config), "mooncake_python": str(self.python)}

    def kill_master(self) -> None:
        """Kills the master like kill -9. Where the blocks are is forgotten with it."""
        self._master.kill()

    def start_master(self) -> None:
        """Starts another master at the same address.

        Raises:
            ChildError: none comes up.
        """
        end_s = time.monotonic() + START_S
        while (master := self._started()) is None:
            if time.monotonic() > end_s:
                raise ChildError(f"no master of Mooncake starts at {self.address} again")
        self._master = master

    def kill_holder(self) -> None:
        """Kills the holder like kill -9. Its blocks are lost."""
        if self._holder is not None:
            self._holder.kill()

    def start_holder(self) -> None:
        """Starts a holder, and waits until the master knows its memory.

        Raises:
            ChildError: it does not come up.
        """
        command = [str(self.python), "-c", HOLDER, self.address, str(SEGMENT_BYTES)]
        self._holder = Rounds("a holder of Mooncake", command, self._home / "holder.log", self._environ)
        self._holder.round({})

    def _first_master(self) -> Child:
        for _ in range(STARTS):
            # Another process may take a port between the question and the start: then others are tried.
            self._port, self._metrics_port = free_port(), free_port()
            if (master := self._started()) is not None:
                return master
        raise ChildError(f"no master of Mooncake starts; see {self._home / 'master.log'}")

    def _started(self) -> Child | None:
        """Returns a master that listens; None if it ends before, as with a port that is taken."""
        ports = f"--rpc_port={self._port}", f"--metrics_port={self._metrics_port}"
        master = Child(
            "Mooncake's master", [self._command, *ports, *MASTER_OPTIONS], self._home / "master.log", self._environ
        )
        end_s = time.monotonic() + START_S
        while master.running and time.monotonic() < end_s:
            if _listens(master.pid, self._port):
                return master
            time.sleep(POLL_S)
        master.kill()
        return None

    def close(self) -> None:
        """Ends both."""
        self.kill_holder()
        self.kill_master()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _listens(pid: int, port: int) -> bool:
    """Returns whether the process itself listens at a TCP port: another process may answer there."""
    wanted = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text("ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                wanted.add(f"socket:[{fields[9]}]")
    return any(_target(one) in wanted for one in Path(f"/proc/{pid}/fd").iterdir())


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # It was closed meanwhile.
        return ""
