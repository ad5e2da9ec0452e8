"""Checks of the media of the ``Dax`` and ``Slab`` tiers: whether they are there, free, and what a depot would take."""

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdepot import _native
from kvdepot.checks.directories import NETWORK, mount_of, unescaped
from kvdepot.checks.finding import Finding
from kvdepot.config import KVDepotConfig
from kvdepot.config.machine import Machine
from kvdepot.config.sizes import GIB
from kvdepot.config.tier_core import tier_object, tiers_in_use
from kvdepot.errors import KVDepotError

PATHS = {"Dax": "device_path", "Slab": "path"}
"""The tiers with a medium, and the setting with its path."""
KINDS = {
    "dax_device": "a DAX device",
    "block_device": "a block device",
    "file": "a file",
    "missing": "a file to create",
}
USABLE = {
    "Dax": "set dax_device_path to a DAX device or an existing file that is empty or formatted by kvdepot, and "
    "dax_max_size_gb to no more than its size",
    "Slab": "set slab_path to a block device or a file that is empty or formatted by kvdepot, and slab_capacity_gb to "
    "no more than its size, but at least three times slab_segment_mb",
}
"""What to do about any other medium, by its tier."""
MENDS = {
    "io": "check that the path is no directory, and the kernel's log (dmesg) for errors of its disk; or name another",
    "permission": "give it to the depot's user: chown, a udev rule for a device, --device for a container",
    "not_found": "correct the path; a Dax tier's file must exist (truncate -s 64G FILE), and a device needs its driver",
    "no_space": "free space on the disk, or lower the capacity",
    "version": "use the version of kvdepot that formatted it, or have it formatted again (docs/operate.md)",
}


PAGE_BYTES = 4096
SLAB_SEGMENTS_MIN = 3
SLAB_SMALL_BYTES = 256 << 20
SLAB_TABLE_BYTES = {True: 16 * PAGE_BYTES, False: 321 * PAGE_BYTES}
"""Bytes of each of the two tables of namespaces, by whether the medium is a small one."""


@dataclass(frozen=True)
class Proc:
    """What ``/proc`` says about mounts and locks. Tests construct their own.

    Attributes:
        mounts: text like ``/proc/self/mountinfo``.
        locks: text like ``/proc/locks``.
    """

    mounts: str
    locks: str

    @staticmethod
    def here() -> "Proc":
        """Returns that of this machine."""
        texts = [Path(path).read_text("utf-8", "surrogateescape") for path in ("/proc/self/mountinfo", "/proc/locks")]
        return Proc(*texts)


@dataclass(frozen=True)
class ConfiguredMedium:
    """A medium of a pipeline.

    Attributes:
        tier: name of the tier.
        path: the file or device.
        settings: the tier's settings as the core reads them.
    """

    tier: str
    path: str
    settings: dict[str, object]


def configured_media(config: KVDepotConfig) -> Iterator[ConfiguredMedium]:
    """Yields the media of a pipeline."""
    for tier in tiers_in_use(config):
        if tier.name in PATHS:
            settings = tier_object(config, tier, Machine.here(), identity=False)
            settings = {name: value for name, value in settings.items() if value is not None}
            yield ConfiguredMedium(tier.name, str(settings[PATHS[tier.name]]), settings)


def capacity_problem(config: KVDepotConfig) -> str | None:
    """Returns why a Slab tier's capacity has no space for its fewest segments, as the core counts them."""
    values = config.model_dump()
    capacity_gb, segment_mb = values["slab_capacity_gb"], values["slab_segment_mb"]
    if "Slab" not in config.tiers or capacity_gb is None:
        return None
    capacity_bytes, segment_bytes = int(capacity_gb * GIB), int(segment_mb) << 20
    overhead_bytes = 2 * PAGE_BYTES + 2 * SLAB_TABLE_BYTES[capacity_bytes < SLAB_SMALL_BYTES]
    if (capacity_bytes - overhead_bytes) // segment_bytes >= SLAB_SEGMENTS_MIN:
        return None
    needed_gb = (SLAB_SEGMENTS_MIN * segment_bytes + 2 * PAGE_BYTES + 2 * SLAB_TABLE_BYTES[False]) / GIB
    return (
        f"slab_capacity_gb: {capacity_gb:g} has no space for the three segments that the tier needs: write "
        f"{needed_gb:.3f} or more, or make slab_segment_mb, which is {segment_mb}, smaller"
    )


def check_media(config: KVDepotConfig, *, runs: bool, proc: Proc | None = None) -> Iterator[Finding]:
    """Checks the media of a pipeline. Changes nothing on them, and takes each one's lock for a moment.

    Args:
        config: the configuration.
        runs: whether the depot of this configuration runs, which then uses the media itself.
        proc: mounts and locks; those of this machine when left out.
    """
    for medium in configured_media(config):
        yield _medium(medium.tier, medium.path, json.dumps(medium.settings), runs, proc or Proc.here())


def _medium(tier: str, path: str, settings: str, runs: bool, proc: Proc) -> Finding:
    check = f"medium {path}"
    why = f"a depot does not start if its {tier} tier cannot use its medium"
    try:
        facts = json.loads(_native.inspect_medium(tier, settings))
    except KVDepotError as error:
        if error.kind == "busy" and runs:
            return Finding(check, "ok", "in use by the depot of this configuration", why)
        if error.kind == "busy" and (point := mounted_at(path, proc)):
            mend = "unmount it, or name another device: a depot writes over what it holds"
            return Finding(check, "fail", f"mounted at {point}", why, mend)
        if error.kind == "busy":
            mend = "stop that process, or name another medium: each has one owner"
            return Finding(check, "fail", f"in use by {holder(path, proc) or 'another process'}", why, mend)
        return Finding(check, "fail", str(error), why, MENDS.get(error.kind, USABLE[tier]))
    found = f"{KINDS[facts['kind']]} of {facts['bytes'] / GIB:.2f} GiB, "
    if facts["kind"] == "missing":
        return _to_create(check, path, facts["bytes"], found + "not there yet", proc)
    formatted = facts["formatted_bytes"]
    found += "empty: the depot formats it" if formatted is None else f"formatted for {formatted / GIB:.2f} GiB"
    if facts["kind"] != "file":
        return Finding(check, "ok", found, why)
    return _mount(check, path, found, proc)


def _to_create(check: str, path: str, wanted: int, found: str, proc: Proc) -> Finding:
    directory = os.path.dirname(path)
    why = "the depot creates and allocates the file when it starts"
    if not os.access(directory, os.W_OK | os.X_OK):
        found = f"{found}, and this user cannot write to {directory}"
        return Finding(check, "fail", found, why, "give the directory to the depot's user")
    facts = os.statvfs(directory)
    free = facts.f_bavail * facts.f_frsize
    if free < wanted:
        found = f"{found}, and {free / GIB:.2f} GiB are free"
        return Finding(check, "fail", found, why, "free space on the disk, or lower slab_capacity_gb")
    return _mount(check, directory, found, proc)


def _mount(check: str, path: str, found: str, proc: Proc) -> Finding:
    """Says what a file lies on."""
    mount = mount_of(path, proc.mounts)
    why = (
        "blocks survive the machine on a disk only, and a medium has one owner, which is known within one machine only"
    )
    found = f"{found}; on {mount.type} ({mount.source})"
    if mount.type in ("tmpfs", "ramfs"):
        return Finding(check, "warn", f"{found}, which is memory", why, "put it on a disk, or enlarge the pool")
    if mount.type in ("overlay", "aufs"):
        return Finding(check, "warn", f"{found}, deleted with the container", why, "mount a volume there")
    if mount.type in NETWORK or mount.type.startswith("fuse"):
        mend = "use a local disk, or make sure that no other machine opens it; Posix is the tier for shared directories"
        return Finding(check, "warn", f"{found}, over the network", why, mend)
    return Finding(check, "ok", found, why)


def holder(path: str, proc: Proc) -> str | None:
    """Returns the process that holds a medium's lock; ``None`` if ``/proc/locks`` does not tell.

    A block device that is claimed without a lock, as by a mount, has no line there. On overlayfs a file may have
    another number there than for ``stat``.
    """
    try:
        facts = os.stat(path)
    except OSError:
        return None
    own = f"{_device(os.major(facts.st_dev), os.minor(facts.st_dev))}:{facts.st_ino}"
    mounted = _mounted(mount_of(path, proc.mounts).device, facts.st_ino)
    for line in proc.locks.splitlines():
        fields = line.split()
        # A line: number, FLOCK, ADVISORY, WRITE, pid, device and inode, start, end.
        if len(fields) < 6 or fields[1] != "FLOCK" or fields[5] not in (own, mounted) or not fields[4].isdigit():
            continue
        # On btrfs each subvolume has files of the same number, and a lock has the device of the file system.
        is_it = True if fields[5] == own else _has_open(fields[4], path)
        if is_it is False:
            continue
        try:
            name = Path(f"/proc/{fields[4]}/comm").read_text("utf-8", "replace").strip()
        except OSError:
            name = "unknown"
        return f"{'' if is_it else 'perhaps '}process {fields[4]} ({name})"
    return None


def mounted_at(path: str, proc: Proc) -> str | None:
    """Returns where a block device is mounted; ``None`` if it is not, or not in this process's namespace."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    if not stat.S_ISBLK(facts.st_mode):
        return None
    device = f"{os.major(facts.st_rdev)}:{os.minor(facts.st_rdev)}"
    for line in proc.mounts.splitlines():
        fields = line.split()
        if len(fields) > 4 and fields[2] == device:
            return unescaped(fields[4])
    return None


def _has_open(pid: str, path: str) -> bool | None:
    """Returns whether a process has a file open, under the same name; ``None`` if that cannot be seen."""
    name = os.path.basename(os.path.realpath(path))
    try:
        return any(_is_open_as(one, name, path) for one in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None


def _is_open_as(descriptor: Path, name: str, path: str) -> bool:
    try:
        # Names first: to ask for the number of a file on a server that hangs would take as long.
        return os.path.basename(os.readlink(descriptor)) == name and os.path.samefile(descriptor, path)
    except OSError:  # closed meanwhile
        return False


def _mounted(device: str, inode: int) -> str | None:
    """Returns a file as ``/proc/locks`` spells it, by the device of its mount, which may not be that of ``stat``."""
    major, _, minor = device.partition(":")
    return f"{_device(int(major), int(minor))}:{inode}" if major.isdigit() and minor.isdigit() else None


def _device(major: int, minor: int) -> str:
    return f"{major:02x}:{minor:02x}"
