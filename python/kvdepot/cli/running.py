"""The depots that run on this machine: those at default sockets, and those of `kvdepot serve` at a configured one."""

import json
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvdepot import _native
from kvdepot.checks.software import DirectoryUser
from kvdepot.cli.processes import own_serving, pid_here, posix_directories, process, serving, uid_of
from kvdepot.cli.status_door import read_page
from kvdepot.config import KVDepotConfig
from kvdepot.config.machine import Machine
from kvdepot.config.socket_path import runtime_directories

WAIT_MS = 5000
UNKNOWN_SOCKET = "an unknown socket"
"""In place of the socket of a depot that cannot be asked."""

BLOCK_BYTES = click.option(
    "--block-bytes", type=click.IntRange(min=1), help="Block size in bytes (Staging pools are sized in blocks)."
)
"""The option of commands that find a depot by its configuration."""


@dataclass(frozen=True)
class RunningDepot:
    """A depot that answers.

    Attributes:
        socket: path where it listens.
        pid: its process id, as this process sees it; 0 if it is in another pid namespace.
        stats: its counters and gauges.
    """

    socket: str
    pid: int
    stats: dict[str, Any]


def running_depots() -> Iterator[RunningDepot]:
    """Yields all depots of this user that answer: at default sockets, then at configured ones of `kvdepot serve`."""
    directories = runtime_directories(Machine.here())
    asked = [path for directory in directories for path in sorted(Path(directory).glob("depot-*.sock"))]
    for path in asked:
        depot = ask(str(path))
        if depot is not None:
            yield depot
    known = {os.path.realpath(path) for path in asked}
    pids: dict[str, set[int]] = {}
    for one in own_serving():
        if one.socket and os.path.realpath(one.socket) not in known:
            pids.setdefault(one.socket, set()).add(one.pid)
    for socket_path, of_socket in pids.items():
        depot = ask(socket_path)
        # In a container the path may be that of another depot.
        if depot is not None and depot.pid in of_socket:
            yield depot


def directory_users() -> Iterator[tuple[str, DirectoryUser]]:
    """Yields the running depots with a Posix tier that tell their configuration, each with its socket.

    It asks the depots at a default socket of this user, and those of `kvdepot serve` with readable command lines.
    """
    found = [*(one.socket for one in running_depots()), *(one.socket for one in serving())]
    for path in dict.fromkeys(path for path in found if path):
        page = read_page(path, "/config", WAIT_MS / 1000)
        if page is None:
            continue
        try:
            tier = json.loads(page).get("posix") or {}
            directories = tuple(os.path.realpath(one) for one in tier.get("directories") or ())
        except (ValueError, AttributeError, TypeError):
            continue  # it is another program
        if directories:
            name = f"the depot at {path} (pid {peer_pid(path) or '?'})"
            yield path, DirectoryUser(name, directories, tier.get("capacity_shared") is True)


def user_of(directories: Iterable[Path], config: KVDepotConfig | None = None) -> RunningDepot | None:
    """Returns a running depot that uses one of these directories, else ``None``.

    It finds depots at a default socket of this user, one at the configuration's socket, and any process `kvdepot serve`
    of this machine whose command line, environment and configuration file are readable. Depots inside another program's
    process and on another node are not found.

    Anybody can start a process with such a command line. One that is not of root, this user or an owner of the
    directories is not connected to: it would get the blocks of an import. The result then names no socket.

    Args:
        directories: directories of a Posix tier.
        config: a configuration whose ``socket`` is also asked if its Posix tier has one of the directories.
    """
    wanted = {os.path.realpath(directory) for directory in directories}

    def uses(found: Iterable[str] | None) -> bool:
        return bool(wanted & {os.path.realpath(directory) for directory in found or ()})

    for depot in running_depots():
        if uses(process(depot.pid).directories):
            return depot
    if config is not None and config.socket is not None and uses(posix_directories(config)):
        answer = ask(config.socket)
        if answer is not None and process(answer.pid).directories is None:
            return answer  # its process does not contradict
    claiming = [one for one in serving() if uses(one.directories)]
    trusted = _users_of(wanted)
    for one in claiming:
        with suppress(OSError):
            if uid_of(one.pid) in trusted:
                # One that does not answer may be starting, ending or hanging: it uses the directories all the same.
                answer = ask(one.socket) if one.socket else None
                return answer or RunningDepot(one.socket or UNKNOWN_SOCKET, one.pid, {})
    return RunningDepot(UNKNOWN_SOCKET, claiming[0].pid, {}) if claiming else None


def _users_of(directories: Iterable[str]) -> set[int]:
    """Returns the users whose depots may be expected to use these directories: root, this one, and the owners."""
    users = {0, os.getuid()}
    for directory in directories:
        with suppress(OSError):
            users.add(os.stat(directory).st_uid)
    return users


def ask(path: str) -> RunningDepot | None:
    """Returns the depot at a socket; ``None`` if none answers within five seconds."""
    pid = peer_pid(path)
    if pid is None:
        return None
    depot = _native.Depot.connect(path, None, wait_ms=WAIT_MS, call_timeout_ms=WAIT_MS)
    try:
        if not depot.attached:
            return None
        stats = json.loads(depot.stats_json()).get("depot")
        if not stats:
            return None  # lost in the meantime
        return RunningDepot(path, pid_here(pid, stats["pid"]), stats)
    finally:
        depot.close()


def peer_pid(path: str) -> int | None:
    """Returns the process that listens at a Unix socket: ``None`` if none does, 0 if it is in another pid namespace."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(WAIT_MS / 1000)
        try:
            connection.connect(os.fspath(path))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return None
    pid: int = struct.unpack("3i", credentials)[0]
    return pid
