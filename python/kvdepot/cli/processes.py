"""Facts about a depot's process: its command line and, for the same user's, its environment."""

import errno
import json
import os
import pwd
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from kvdepot.cli import wire
from kvdepot.config import KVDepotConfig, load_config
from kvdepot.config.machine import Machine
from kvdepot.errors import KVDepotError

PROC = Path("/proc")


@dataclass(frozen=True)
class DepotProcess:
    """A process ``kvdepot serve``.

    Attributes:
        pid: its process id.
        directories: directories of its Posix tier; empty without that tier, ``None`` = unknown.
        socket: socket from its command line or configuration; empty = a default one.
    """

    pid: int
    directories: tuple[str, ...] | None
    socket: str


def serving() -> Iterator[DepotProcess]:
    """Yields the processes ``kvdepot serve`` of this machine, of every user whose command lines are readable."""
    for entry in sorted(PROC.iterdir()):
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if is_serving(int(entry.name)):
                    yield process(int(entry.name))


def is_serving(pid: int) -> bool:
    """Returns whether a process is `kvdepot serve`. Raises ``OSError`` if its command line cannot be read."""
    return any(os.path.basename(one) == "kvdepot" and two == "serve" for one, two in pairwise(_words(pid)))


def own_serving() -> Iterator[DepotProcess]:
    """Yields the processes ``kvdepot serve`` of this user."""
    for one in serving():
        with suppress(OSError):
            if uid_of(one.pid) == os.getuid():
                yield one


def uid_of(pid: int) -> int:
    """Returns the user of a process. Raises ``OSError`` if it has ended."""
    return (PROC / str(pid)).stat().st_uid


def pid_here(listener: int, told: int) -> int:
    """Returns a depot's process id as this process sees it; 0 = it is in another pid namespace, or unknown.

    Args:
        listener: the process that created the depot's socket, as this process sees it; 0 = in another pid namespace.
        told: the process id that the depot tells, as it sees itself.
    """
    if not listener or listener == told:
        return listener
    with suppress(OSError, StopIteration, ValueError):
        lines = (PROC / str(listener) / "status").read_text().splitlines()
        inner = next(line for line in lines if line.startswith("NSpid:")).split()[1:]
        if len(inner) > 1 and int(inner[-1]) == told:
            return listener  # of a container on this machine
    # A depot that took the socket over is not the process that created it.
    with suppress(OSError):
        if is_serving(told):
            return told
    return 0


def process(pid: int) -> DepotProcess:
    """Returns the known facts about a depot's process."""
    try:
        options = _options(_words(pid))
        socket = _beside(pid, options["--socket"]) if "--socket" in options else ""
    except OSError:
        return DepotProcess(pid, None, "")
    try:
        if "--core-json" in options:
            tier = json.loads(options["--core-json"]).get("posix") or {}
            return DepotProcess(pid, tuple(str(one) for one in tier.get("directories") or ()), socket)
        machine = replace(Machine.here(), environ=_environ(pid))
        file = options.get("--config")
        if wire.wanted_by(options) and wire.memory_only(file, machine.environ):
            return DepotProcess(pid, (), socket)
        config = load_config(file and _file_of(pid, file), machine=machine, owns_pool=False)
        return DepotProcess(pid, tuple(posix_directories(config, machine)), socket or config.socket or "")
    except (OSError, KeyError, ValueError, TypeError, AttributeError, KVDepotError):
        return DepotProcess(pid, None, socket)


def posix_directories(config: KVDepotConfig, machine: Machine | None = None) -> list[str]:
    """Returns the directories of a configuration's Posix tier; empty without that tier."""
    if "Posix" not in config.tiers:
        return []
    values = {setting.key: setting.value for setting in config.effective(machine)}
    found = values["directories"]
    return [str(one) for one in (found if isinstance(found, list | tuple) else [found])]


def _words(pid: int) -> list[str]:
    return (PROC / str(pid) / "cmdline").read_bytes().decode("utf-8", "surrogateescape").split("\0")


def _options(words: Sequence[str]) -> dict[str, str]:
    """Parses options ``--name value`` and ``--name=value``; a switch gets whatever follows it as its value."""
    found = {}
    for word, following in pairwise([*words, ""]):
        if word.startswith("--"):
            name, is_, value = word.partition("=")
            found[name] = value if is_ else following
    return found


def _environ(pid: int) -> Mapping[str, str]:
    try:
        lines = (PROC / str(pid) / "environ").read_bytes().decode("utf-8", "surrogateescape").split("\0")
    except PermissionError:
        # The process of another user: its home directory is known, and most depots have no variables.
        return {"HOME": pwd.getpwuid(uid_of(pid)).pw_dir}
    return dict(line.split("=", 1) for line in lines if "=" in line)


def _file_of(pid: int, path: str) -> str:
    """Returns the path of that process's configuration file.

    Raises ``OSError`` for anything but a file: a pipe never ends, and ``/dev/stdin`` is another one here.
    """
    found = os.path.realpath(_beside(pid, path))
    if found.startswith(("/dev/", "/proc/")) or not stat.S_ISREG(os.stat(found).st_mode):
        raise OSError(errno.EINVAL, "not a file", found)
    return found


def _beside(pid: int, path: str) -> str:
    """Returns a path as that process sees it."""
    return path if os.path.isabs(path) else os.path.join(os.readlink(PROC / str(pid) / "cwd"), path)
