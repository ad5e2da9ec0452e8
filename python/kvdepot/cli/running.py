"""The depots that run on this machine, as far as their sockets lie where kvdepot puts them."""

import json
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvdepot import _native
from kvdepot.config import KVDepotConfig, load_config
from kvdepot.config.machine import Machine
from kvdepot.config.socket_path import runtime_directories
from kvdepot.errors import KVDepotError

WAIT_MS = 5000


@dataclass(frozen=True)
class RunningDepot:
    """A depot that answers.

    Attributes:
        socket: where it listens.
        pid: its process, as this process sees it; 0 when the kernel does not tell.
        stats: its counters and gauges.
    """

    socket: str
    pid: int
    stats: dict[str, Any]


def running_depots() -> Iterator[RunningDepot]:
    """All depots of this user that answer."""
    for directory in runtime_directories(Machine.here()):
        for path in sorted(Path(directory).glob("depot-*.sock")):
            depot = ask(str(path))
            if depot is not None:
                yield depot


def user_of(directories: Iterable[Path]) -> RunningDepot | None:
    """A running depot of this user that uses one of these directories, as far as its command line says it."""
    wanted = {os.path.realpath(directory) for directory in directories}
    for depot in running_depots():
        if wanted & {os.path.realpath(directory) for directory in directories_of(depot.pid)}:
            return depot
    return None


def directories_of(pid: int) -> list[str]:
    """The directories of the Posix tier of the depot with this process id; none where they cannot be found out."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "surrogateescape").split("\0")
        options = dict(pairwise(words))
        if "--core-json" in options:
            tier = json.loads(options["--core-json"]).get("posix") or {}
            return [str(directory) for directory in tier.get("directories") or ()]
        lines = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "surrogateescape").split("\0")
        environ = dict(line.split("=", 1) for line in lines if "=" in line)
        machine = replace(Machine.here(), environ=environ)
        file = options.get("--config")
        where = os.readlink(f"/proc/{pid}/cwd")
        config = load_config(file and os.path.join(where, file), machine=machine, owns_pool=False)
        return posix_directories(config, machine)
    except (OSError, ValueError, TypeError, AttributeError, KVDepotError):
        return []


def posix_directories(config: KVDepotConfig, machine: Machine | None = None) -> list[str]:
    """The directories of a configuration's Posix tier; none without that tier."""
    if "Posix" not in config.tiers:
        return []
    values = {setting.key: setting.value for setting in config.effective(machine)}
    found = values["directories"]
    return [str(one) for one in (found if isinstance(found, list | tuple) else [found])]


def ask(path: str) -> RunningDepot | None:
    """The depot at a socket; ``None`` when none answers within five seconds."""
    pid = peer_pid(path)
    if pid is None:
        return None
    depot = _native.Depot.connect(path, None, wait_ms=WAIT_MS, call_timeout_ms=WAIT_MS)
    try:
        if not depot.attached:
            return None
        stats = json.loads(depot.stats_json()).get("depot")
        if not stats:
            return None  # lost meanwhile
        # A depot that took the socket over is not the process that made it, and knows its own number.
        return RunningDepot(path, stats["pid"] if pid else 0, stats)
    finally:
        depot.close()


def peer_pid(path: str) -> int | None:
    """The process that listens at a Unix socket: ``None`` when none does, 0 when it is in another pid namespace."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(WAIT_MS / 1000)
        try:
            connection.connect(os.fspath(path))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
