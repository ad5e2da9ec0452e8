"""Checks of directories for block files: whether they exist, their file system, and which I/O works in them."""

import contextlib
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvdepot import _native
from kvdepot.checks.finding import Finding
from kvdepot.config import KVDepotConfig, load_config
from kvdepot.config.machine import Machine
from kvdepot.config.sizes import GIB
from kvdepot.errors import KVDepotError

NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "glusterfs", "9p", "beegfs", "afs")
CLOCK_APART_S = 5.0
LAYOUT = [64 << 10]
TRIAL_MS = 20_000


@dataclass(frozen=True)
class Mount:
    """The mount that holds a directory: file system type, source, mount point and device (``major:minor``)."""

    type: str
    source: str
    point: str
    device: str = ""


def unusable(directory: str) -> tuple[str, str] | None:
    """Returns why a depot could not store in a directory, and what to do; ``None`` if it could."""
    if not os.path.isdir(directory):
        return (
            f"{directory} is not there",
            "create it. A depot does not, because it would fill the root file system if a disk is not mounted",
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"this user cannot write to {directory}", "give it to the depot's user, or name another one"
    return None


def check_directories(config: KVDepotConfig, mountinfo: str | None = None) -> Iterator[Finding]:
    """Checks the directories of the ``Posix`` tier. Each is written to briefly, and left as it was.

    Args:
        config: the configuration.
        mountinfo: text like ``/proc/self/mountinfo``; the content of that file when left out.
    """
    if "Posix" not in config.tiers:
        return
    values = {setting.key: setting for setting in config.effective()}
    directories = [str(one) for one in values["directories"].value or ()]  # type: ignore[attr-defined]
    if mountinfo is None:
        mountinfo = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    for directory in directories:
        if not os.path.lexists(directory) and values["directories"].origin == "machine":
            why = "block files are stored there"
            yield Finding(
                f"directory {directory}", "ok", "it is created when a depot starts without a configuration", why
            )
            continue
        yield from check_directory(directory, config, mountinfo)
    yield from _capacity(directories, values["posix_capacity_gb"].value)


def check_directory(directory: str, config: KVDepotConfig, mountinfo: str) -> Iterator[Finding]:
    """Checks one directory."""
    name = f"directory {directory}"
    if (problem := unusable(directory)) is not None:
        yield Finding(name, "fail", problem[0], "a depot does not start without it", problem[1])
        return
    yield _mount(directory, mount_of(directory, mountinfo), config)
    yield _space(directory, config)
    try:
        yield _direct(directory)
        yield _clock(directory)
        yield _trial(directory)
    except OSError as error:
        mend = "check the disk, its quota and the kernel's log"
        yield Finding(name, "fail", f"a file could not be written: {error.strerror or error}", "blocks are files", mend)


def mount_of(directory: str, mountinfo: str) -> Mount:
    """Returns the mount that holds a directory, by text like ``/proc/self/mountinfo``."""
    path, best = os.path.realpath(directory), Mount("unknown", "unknown", "")
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, facts = before.split(), after.split()
        if len(fields) < 5 or len(facts) < 2:
            continue
        point = unescaped(fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # Of equal mount points, the last one is on top.
        if inside and len(point) >= len(best.point):
            best = Mount(facts[0], facts[1], point, fields[2])
    return best


def unescaped(point: str) -> str:
    """Returns a mount point as it is: mountinfo has octal numbers for spaces."""
    return point.encode("latin-1", "backslashreplace").decode("unicode_escape")


def _mount(directory: str, mount: Mount, config: KVDepotConfig) -> Finding:
    check = f"mount of {directory}"
    found = f"{mount.type} ({mount.source}) at {mount.point}"
    why = "blocks survive the depot only on a disk; a network file system is slower and may be shared"
    if mount.type in ("tmpfs", "ramfs"):
        return Finding(
            check, "warn", found + ": this is memory", why, "name a directory on a disk, or enlarge the pool"
        )
    if mount.type in ("overlay", "aufs"):
        return Finding(check, "warn", found + ": it is deleted with the container", why, "mount a volume there")
    if mount.type in NETWORK or mount.type.startswith("fuse"):
        if config.directories_shared:  # type: ignore[attr-defined]
            return Finding(check, "ok", found + ": over the network", why)
        mend = "directories_shared: true, if several nodes use it"
        return Finding(check, "warn", found + ": over the network, with directories_shared: false", why, mend)
    if mount.point == "/":
        mend = "mount the intended disk, or check that the root file system is intended"
        return Finding(check, "warn", found + ": the root file system", why, mend)
    return Finding(check, "ok", found, why)


def _space(directory: str, config: KVDepotConfig) -> Finding:
    facts = os.statvfs(directory)
    free, total = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    percent = 100 * free / total if total else 0.0
    found = f"{free / GIB:.1f} GiB of {total / GIB:.1f} GiB free ({percent:.0f} %)"
    why = f"a depot evicts its own blocks to keep {config.posix_free_floor_percent} % of the disk free"  # type: ignore[attr-defined]
    check = f"space of {directory}"
    if facts.f_files and not facts.f_favail:
        return Finding(check, "fail", found + ", no inodes", why, "remove files: each block is one")
    if percent <= config.posix_free_floor_percent:  # type: ignore[attr-defined]
        return Finding(check, "fail", found, why, "free space on the disk, or name another directory")
    return Finding(check, "ok", found, why)


def _capacity(directories: Iterable[str], capacity_gb: object) -> Iterator[Finding]:
    disks = {}
    for directory in directories:
        with contextlib.suppress(OSError):
            facts = os.statvfs(directory)
            disks[os.stat(directory).st_dev] = facts.f_blocks * facts.f_frsize
    if not disks or not isinstance(capacity_gb, int | float) or not capacity_gb:
        return
    total = sum(disks.values()) / GIB
    found = f"{capacity_gb:g} GiB for blocks, on disks of {total:.1f} GiB"
    why = "a tier may grow to posix_capacity_gb over all directories"
    if capacity_gb > total:
        yield Finding("capacity", "warn", found, why, "lower posix_capacity_gb: the free floor evicts blocks earlier")
    else:
        yield Finding("capacity", "ok", found, why)


def _direct(directory: str) -> Finding:
    check = f"O_DIRECT in {directory}"
    why = "with it, large reads bypass the page cache, which leaves the cache to the engine"
    path = os.path.join(directory, f".probe-{os.getpid()}-{os.urandom(6).hex()}")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        page = mmap.mmap(-1, 4096)
        page.write(b"\xa5" * 4096)
        try:
            direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            return Finding(
                check, "warn", f"refused: {error.strerror}", why, "nothing needs to be done: reads are cached"
            )
        try:
            os.write(direct, page)
        except OSError as error:
            return Finding(
                check, "warn", f"refused: {error.strerror}", why, "nothing needs to be done: reads are cached"
            )
        finally:
            os.close(direct)
        return Finding(check, "ok", "works", why)
    finally:
        os.close(file)
        os.unlink(path)


def _clock(directory: str) -> Finding:
    check = f"clock of {directory}"
    why = "a block's last use is its file's time: if the clocks differ, the wrong blocks are evicted first"
    with tempfile.NamedTemporaryFile(dir=directory, prefix=f".probe-{os.getpid()}-") as file:
        file.write(b"x")
        file.flush()
        apart = os.fstat(file.fileno()).st_mtime - time.time()
    found = f"{abs(apart):.1f} s {'ahead of' if apart > 0 else 'behind'} this machine's"
    if abs(apart) > CLOCK_APART_S:
        return Finding(check, "warn", found, why, "synchronise the clocks of this machine and the file server (NTP)")
    return Finding(check, "ok", found, why)


def _trial(directory: str) -> Finding:
    """Stores a block with a temporary depot in a temporary directory, drops it from the pool, and reads it back."""
    check = f"I/O in {directory}"
    why = "io_uring keeps many reads in flight on a thread; without it the next engine is used"
    place = tempfile.mkdtemp(dir=directory, prefix=f".probe-{os.getpid()}-")
    try:
        engine, wrong = _round_trip(place)
    except KVDepotError as error:
        return Finding(check, "fail", f"a block could not be stored: {error}", why, "check the disk and its quota")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if wrong:
        return Finding(check, "fail", wrong, why, "check the disk, its quota and the kernel's log")
    if engine != "io_uring":
        mend = "nothing needs to be done; a container's seccomp profile or kernel.io_uring_disabled forbids io_uring"
        found = f"a block was stored and read back; io_uring is refused, {engine} works"
        return Finding(check, "warn", found, why, mend)
    return Finding(check, "ok", "a block was stored and read back, by io_uring", why)


def _round_trip(place: str) -> tuple[str, str]:
    """Returns the I/O engine that a depot chose when asked for io_uring, and what went wrong (empty: nothing)."""
    given = {
        "pipeline": "Cache|Posix",
        "mode": "embedded",
        "directories": [place],
        "pool_gb": 0.0625,
        "posix_capacity_gb": 0.0625,
        "posix_free_floor_percent": 0,
        "io_engine": "io_uring",
        "io_read_threads": 1,
        "io_write_threads": 1,
        "directories_shared": False,
        "log_level": "error",
    }
    block = np.frombuffer(os.urandom(LAYOUT[0]), dtype=np.uint8).copy()
    # The environment must not affect the trial.
    machine = replace(Machine.here(), environ={})
    core, name, facts = (
        load_config(given, machine=machine).to_core_json(),
        b"a block of the check",
        json.dumps({"kind": "doctor"}),
    )
    for write in (True, False):
        depot = _native.Depot.embedded(core)
        try:
            stats = json.loads(depot.stats_json())
            engine = str(stats["depot"]["tiers"][0].get("engine", "psync"))
            store = depot.store(depot.open_namespace(facts, json.dumps([[1, LAYOUT]])), timeout_ms=TRIAL_MS)
            memory = block if write else np.zeros_like(block)
            rows, addresses = np.zeros(1, dtype=np.int64), np.array([[memory.ctypes.data]], dtype=np.uint64)
            task = (store.dump if write else store.load)([name], rows, addresses, memory)
            task.wait(TRIAL_MS)
            if task.failures():
                return engine, f"a block could not be {'stored' if write else 'read back'}: {task.failures()}"
            if write and not depot.drain(TRIAL_MS):
                return engine, f"a block was not written within {TRIAL_MS / 1000:.0f} s"
            if not (memory == block).all():
                return engine, "a block was read back with different bytes"
            store.close(TRIAL_MS)
        finally:
            depot.close()
    return engine, ""
