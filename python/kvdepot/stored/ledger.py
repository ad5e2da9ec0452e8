"""Reads the ledger of the depots that share one cap. ``docs/format.md`` has its bytes."""

import contextlib
import os
import re
import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdepot import _native
from kvdepot.stored.temporaries import own_host, start_time

LEDGER = ".kvdepot-ledger"
LEASE_S = 120
"""For how long a member may be silent."""
_NUMBER = re.compile(r"[0-9]{20}")
_HEAD = struct.Struct("<8sII8Q")
_ROW = struct.Struct("<10qII120s")
_CHECKSUM = struct.Struct("<Q")
_ROWS_MAX = 256
_GONE = 2
_NAME = re.compile(r"(.+)-([0-9]{1,10})-([0-9]{1,20})-([0-9]{1,20})")


@dataclass(frozen=True)
class Member:
    """A depot that shares the cap of a directory.

    Attributes:
        host: its host, as temporary names spell it: host name, boot and pid namespace.
        pid: its process id there.
        capacity_bytes: its own ``posix_capacity_gb``.
        here: whether it ran on this host.
        running: whether it runs; ``None`` for one on another host, which may.
    """

    host: str
    pid: int
    capacity_bytes: int
    here: bool
    running: bool | None


@dataclass(frozen=True)
class Ledger:
    """The newest ledger of a directory.

    Attributes:
        path: its file.
        age_s: seconds since one of its members wrote it, by the clock of its file system; 0 if that cannot be read.
        bound_bytes: bytes of all block files and of what may be written unasked, at most.
        members: those that may run.
    """

    path: Path
    age_s: float
    bound_bytes: int
    members: tuple[Member, ...]


def find_ledgers(directories: Iterable[Path]) -> Iterator[Ledger]:
    """Yields the ledger of each directory that has one this version can read.

    Raises:
        OSError: a directory cannot be read.
    """
    for directory in directories:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            numbers = [name for name in os.listdir(directory / LEDGER) if _NUMBER.fullmatch(name)]
            if numbers:
                path = directory / LEDGER / max(numbers)
                now_s = _now_s(directory)
                found = _parse(path.read_bytes(), path, max(0.0, now_s - path.stat().st_mtime))
                if found is not None:
                    yield found


def _now_s(directory: Path) -> float:
    """Returns the time by the clock that dates the files here, which on NFS is the server's.

    Where nothing can be written it is unknown, and returns 0: then every member of a ledger may run.
    """
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            with contextlib.suppress(OSError):  # on a full disk the time of its creation has to do
                file.write(b"\n")
                os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0


def _parse(data: bytes, path: Path, age_s: float) -> Ledger | None:
    """Returns a ledger; ``None`` for a damaged one and one of another version."""
    if len(data) < _HEAD.size + _CHECKSUM.size:
        return None
    magic, version, rows, number, bound, *_ = _HEAD.unpack_from(data)
    end = _HEAD.size + rows * _ROW.size
    if (magic, version, number) != (b"KVDLEDGR", 1, int(path.name)) or rows > _ROWS_MAX:
        return None
    if len(data) != end + _CHECKSUM.size or _CHECKSUM.unpack_from(data, end)[0] != _native.crc64nvme(data[:end]):
        return None
    found = (_member(_ROW.unpack_from(data, at), age_s) for at in range(_HEAD.size, end, _ROW.size))
    return Ledger(path, age_s, bound, tuple(member for member in found if member is not None))


def _member(row: tuple[Any, ...], age_s: float) -> Member | None:
    """Returns the member of a row; ``None`` if it has ended."""
    capacity, flags, name_bytes, name = row[2], row[10], row[11], row[12]
    match = _NAME.fullmatch(name[:name_bytes].decode("ascii", "replace"))
    if match is None or flags & _GONE:
        return None
    host, pid, start = match[1], int(match[2]), int(match[3])
    if host == own_host():
        runs = start_time(pid) == start
        return Member(host, pid, capacity, here=True, running=True) if runs else None
    # Whoever wrote it last, none of the others is known to have ended before their lease has.
    return Member(host, pid, capacity, here=False, running=None) if age_s <= LEASE_S else None
