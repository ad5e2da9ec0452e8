"""A server that speaks InfiniStore's protocol, as a child process: ours, or InfiniStore's own."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from ctypes.util import find_library
from functools import cache
from pathlib import Path
from types import TracebackType

import yaml
from typing_extensions import Self

from tools.lab.child import POLL_S, Child
from tools.lab.ports import LOOPBACK, free_port

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = ("kvdepot", "infinistore")
START_S = 60.0
CALL_S = 30.0
POOL_GIB = 1
LINK_TYPE = "IB"
LIBRARY = "libibverbs.so.1"
# Environment variables: the stand-in for libibverbs, and the command that starts our server.
STANDIN = "KVDEPOT_STANDIN_VERBS"
COMMAND = "KVDEPOT_COMMAND"

LIST_DEVICES = """
import ctypes, sys
verbs = ctypes.CDLL(sys.argv[1])
verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
verbs.ibv_get_device_name.restype = ctypes.c_char_p
verbs.ibv_get_device_name.argtypes = [ctypes.c_void_p]
count = ctypes.c_int()
devices = verbs.ibv_get_device_list(ctypes.byref(count))
print(verbs.ibv_get_device_name(devices[0]).decode() if count.value else "")
"""


class NoServerError(Exception):
    """This kind of server cannot be started here; the text says why."""


def standin_verbs() -> Path | None:
    """Returns the stand-in for libibverbs, if one is given."""
    given = os.environ.get(STANDIN)
    return Path(given).absolute() if given else None


def preload(library: Path | None) -> dict[str, str]:
    """Returns the environment of a process that loads ``library`` as libibverbs, or of one without RDMA.

    A process that looks libibverbs up by name at run time, as our server does, finds it only under that name.
    """
    if library is None:
        return loadable()
    found = {"LD_PRELOAD": str(library)}
    return {**found, "LD_LIBRARY_PATH": str(library.parent)} if library.name == LIBRARY else found


@cache
def loadable() -> dict[str, str]:
    """Returns an environment in which InfiniStore's client can be imported: it links to libibverbs, even for TCP.

    A system without libibverbs gets the stand-in.
    """
    library = standin_verbs()
    return {} if library is None or find_library("ibverbs") else {"LD_LIBRARY_PATH": str(library.parent)}


def device_of(library: Path) -> str:
    """Returns the name of the first device of a libibverbs look-alike."""
    # In a separate process: a look-alike may start threads, or leave files, when it is loaded.
    found = subprocess.run(
        [sys.executable, "-c", LIST_DEVICES, str(library)], check=True, capture_output=True, text=True
    )
    name = found.stdout.strip()
    if not name:
        raise NoServerError(f"{library} has no device")
    return name


def kvdepot_command() -> list[str]:
    """Returns the command of our command line: $KVDEPOT_COMMAND, else that of .venv."""
    given = os.environ.get(COMMAND)
    if given:
        return given.split()
    installed = ROOT / ".venv" / "bin" / "kvdepot"
    if not installed.exists():
        raise NoServerError(f"no {installed}: run make setup, or name the command by {COMMAND}")
    return [str(installed)]


class Server:
    """A server on its own ports. It can be killed and restarted on the same ports; its pool starts empty."""

    def __init__(
        self,
        kind: str,
        *,
        pool_gib: int = POOL_GIB,
        rdma: bool = False,
        options: Sequence[str] = (),
        keep_log: Path | None = None,
    ) -> None:
        self.kind = kind
        self.library = standin_verbs() if rdma or kind == "infinistore" else None
        if self.library is None and (rdma or kind == "infinistore"):
            raise NoServerError(
                f"{'InfiniStore does not start' if kind == 'infinistore' else 'no RDMA'} without an RDMA device: "
                f"name a stand-in for libibverbs by {STANDIN}"
            )
        self.device = device_of(self.library) if self.library else ""
        self.port = free_port()
        self.manage_port = free_port()
        self.pool_gib = pool_gib
        self.options = list(options)
        self._home = Path(tempfile.mkdtemp(prefix="kvdepot-wire-"))
        self.log = keep_log or self._home / f"{kind}.log"
        self.starts = 0
        self._child = self._start()

    def _command(self) -> list[str]:
        common = ["--service-port", self.port, "--manage-port", self.manage_port, "--prealloc-size", self.pool_gib]
        if self.library:
            common += ["--dev-name", self.device, "--link-type", LINK_TYPE]
        if self.kind == "infinistore":
            start = [sys.executable, "-m", "tools.wire.infinistore_server", "--log-level", "warning"]
        else:
            config = self._home / "kvdepot.yaml"
            config.write_text(yaml.safe_dump({"pipeline": "Cache", "socket": str(self._home / "depot.sock")}))
            start = [*kvdepot_command(), "serve", "--config", str(config), "--host", LOOPBACK]
        return [*map(str, start), *map(str, common), *self.options]

    def _start(self) -> Child:
        environ = {"PYTHONPATH": str(ROOT), **preload(self.library)}
        child = Child(f"the {self.kind} server", self._command(), self.log, environ)
        self.starts += 1
        child.wait_until_ready(self.answers, START_S)
        return child

    @property
    def address(self) -> str:
        """Address of its service port, as ``remote_servers`` spells it."""
        return f"{LOOPBACK}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether its process is alive."""
        return self._child.running

    def ends_within(self, timeout_s: float) -> bool:
        """Returns whether its process exits within that time."""
        end_s = time.monotonic() + timeout_s
        while self.alive and time.monotonic() < end_s:
            time.sleep(POLL_S)
        return not self.alive

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def answers(self) -> bool:
        """Returns whether both ports answer: the service port to a connection, the other with the number of keys."""
        try:
            with socket.create_connection((LOOPBACK, self.port), CALL_S):
                pass
            self.kvmap_len()
        except (OSError, ValueError):
            return False
        return True

    def manage(self, path: str, *, method: str = "GET") -> bytes:
        """Returns the body of an answer of the management port."""
        request = urllib.request.Request(f"http://{LOOPBACK}:{self.manage_port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=CALL_S) as answer:
            body: bytes = answer.read()
            return body

    def kvmap_len(self) -> int:
        """Returns the number of keys, as the management port reports it."""
        return int(json.loads(self.manage("/kvmap_len"))["len"])

    def purge(self) -> int:
        """Drops all keys. Returns their number."""
        return int(json.loads(self.manage("/purge", method="POST"))["num"])

    def rss_bytes(self) -> int:
        """Returns the memory that its process currently uses, in bytes."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def open_files(self) -> int:
        """Returns the number of descriptors that its process currently holds."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def tail(self) -> str:
        """Returns the end of its log."""
        return self._child.tail()

    def kill(self) -> None:
        """Kills it like kill -9."""
        self._child.kill()

    def restart(self) -> None:
        """Restarts it on the same ports, killing it first if it is running."""
        self.kill()
        self._child = self._start()

    def close(self) -> None:
        """Ends it and removes its leftovers."""
        self.kill()
        shutil.rmtree(self._home, ignore_errors=True)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to its process."""
        os.kill(self.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
