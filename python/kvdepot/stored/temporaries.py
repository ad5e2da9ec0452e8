"""Names of temporary files, and whether a file's writer is alive. ``docs/format.md`` has the spelling."""

import os
import re
from pathlib import Path

ORPHAN_AGE_S = 3600
_TEMPORARY = re.compile(r"\.tmp-([0-9A-Za-z._]+)-([0-9]{1,10})-([0-9]{1,20})-([0-9]{1,20})")
_PROBE = re.compile(r"\.probe-([0-9]{1,10}-[0-9a-z_]+|trial-[0-9a-f]{16}-[0-9]+t?)")
_PROBE_DIRECTORY = re.compile(r"\.probe-[0-9]{1,10}-[0-9a-z_]{8}")


def is_ours(name: str, *, directory: bool) -> bool:
    """Returns whether kvdepot names temporary files, or directories, like this."""
    if directory:
        return bool(_PROBE_DIRECTORY.fullmatch(name))
    return bool(_TEMPORARY.fullmatch(name) or _PROBE.fullmatch(name))


def is_orphan(name: str, age_s: float) -> bool:
    """Returns whether the temporary file of this name has lost its writer.

    Args:
        name: a name that ``is_ours``.
        age_s: seconds since the last write to it.
    """
    match = _TEMPORARY.fullmatch(name)
    if match is not None and match[1] == own_host():
        return start_time(int(match[2])) != int(match[3])
    return age_s > ORPHAN_AGE_S


def own_host() -> str:
    """Returns this host as temporary names spell it: host name, boot and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
        namespace = os.readlink("/proc/self/ns/pid")
        name = Path("/proc/sys/kernel/hostname").read_text("utf-8", "replace").strip()
    except OSError:
        return ""
    digits = re.sub(r"[^0-9]", "", namespace)
    return f"{re.sub(r'[^0-9A-Za-z.]', '_', name[:64])}.{re.sub(r'[^0-9a-fA-F]', '', boot)[:8]}.{digits}"


def start_time(pid: int) -> int | None:
    """Returns clock ticks from boot to the process's start; ``None`` if it does not exist, or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    fields = stat[stat.rfind(")") + 1 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
