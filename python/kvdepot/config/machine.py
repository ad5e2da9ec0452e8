"""Facts of the machine that defaults depend on: memory, free disk space, the user's directories."""

import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")

DISK_ANSWER_S = 2.0
"""Seconds that a disk may take to tell its size: a mount whose server is down may never answer."""


@dataclass(frozen=True)
class Machine:
    """The machine as defaults see it. Tests construct their own.

    Attributes:
        memory_bytes: memory that this process may use: the machine's, or its control group's when that is less.
        environ: environment variables.
        free_disk_bytes: free space where the default directory lies; ``None`` = queried when needed.
        total_disk_bytes: size of the disks that hold configured directories; ``None`` = queried when needed.
    """

    memory_bytes: int
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    free_disk_bytes: int | None = None
    total_disk_bytes: int | None = None

    @staticmethod
    def here() -> "Machine":
        """Returns the machine that this process runs on."""
        return Machine(memory_bytes=usable_memory_bytes())

    def cache_directory(self) -> str:
        """Returns ``kvdepot`` in the user's cache directory (``XDG_CACHE_HOME`` or ``~/.cache``)."""
        base = self.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):
            base = os.path.join(self.environ.get("HOME") or os.path.expanduser("~"), ".cache")
        return os.path.join(base, "kvdepot")

    def interpreter(self) -> str | None:
        """Returns the path of the running Python interpreter; ``None`` in a program that embeds one."""
        return sys.executable or None

    def device_cache_directory(self) -> str:
        """Returns the directory where engines keep their measurements of devices."""
        return f"{self.cache_directory()}-devices"

    def free_bytes(self, directory: str) -> int:
        """Returns the free bytes of the disk that holds ``directory``, which need not exist yet."""
        if self.free_disk_bytes is not None:
            return self.free_disk_bytes
        facts = os.statvfs(_existing(directory))
        return facts.f_bavail * facts.f_frsize

    def disk_bytes(self, directories: Iterable[str]) -> int | None:
        """Returns the size in bytes of the disks that hold ``directories``, counting each disk once.

        ``None`` if one of them fails or does not answer within ``DISK_ANSWER_S``.
        """
        if self.total_disk_bytes is not None:
            return self.total_disk_bytes
        paths = list(directories)
        return _in_time(lambda: _disk_bytes(paths))


def _disk_bytes(directories: Iterable[str]) -> int:
    disks = {}
    for directory in directories:
        # What fails, as a mount whose server is down does, must not count as missing: the directory above it lies on
        # another disk.
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.stat(directory)
        place = _existing(directory)
        facts = os.statvfs(place)
        disks[os.stat(place).st_dev] = facts.f_blocks * facts.f_frsize
    return sum(disks.values())


def _in_time(ask: Callable[[], int]) -> int | None:
    """Returns a disk's answer; ``None`` if it fails or is late. Then its thread stays, as long as the disk hangs."""
    answers: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(ask())
        except OSError:
            answers.put(None)

    threading.Thread(target=run, name="kvdepot-disk-size", daemon=True).start()
    try:
        return answers.get(timeout=DISK_ANSWER_S)
    except queue.Empty:
        return None


def _existing(directory: str) -> str:
    """Returns the nearest existing directory at or above ``directory``."""
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    return directory


def usable_memory_bytes() -> int:
    """Returns the machine's memory in bytes, or the lowest limit of this process's control groups if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for limit in map(_read_limit, _limit_files()) if limit]
    return min([total, *limits])


def processor_quota() -> float | None:
    """Returns how many processors the control groups of this process may use; ``None`` if they have no quota."""
    quotas = map(_read_quota, _group_files("cpu", "cpu.max", "cpu.cfs_quota_us"))
    return min((quota for quota in quotas if quota is not None), default=None)


def _read_quota(file: Path) -> float | None:
    try:
        words = file.read_text("ascii").split()
        if words[:1] in (["max"], ["-1"]):
            return None
        # Version 1 has the period in a file of its own.
        period = words[1] if len(words) > 1 else file.with_name("cpu.cfs_period_us").read_text("ascii")
        return int(words[0]) / int(period)
    except (OSError, ValueError, IndexError, ZeroDivisionError):
        return None


def _limit_files() -> list[Path]:
    return _group_files("memory", "memory.max", "memory.limit_in_bytes")


def _group_files(controller: str, name: str, name_v1: str) -> list[Path]:
    """Returns the paths of a controller's file in all control groups of this process, of version 2 and 1."""
    files = []
    try:
        lines = OWN_GROUPS.read_text("utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            root, file = CGROUP_ROOT, name
        elif controller in controllers.split(","):
            root, file = CGROUP_ROOT / controller, name_v1
        else:
            continue
        own = Path(group.lstrip("/"))
        files += [root / part / file for part in (own, *own.parents)]
    return files


def _read_limit(file: Path) -> int | None:
    try:
        return int(file.read_text("ascii"))
    except (OSError, ValueError):
        return None
