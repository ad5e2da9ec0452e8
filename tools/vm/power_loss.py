"""Makes files of what a loss of power may leave of a disk, at several moments.

QEMU logs all writes and flushes of a disk (``blklogwrites``, in the format of Linux's dm-log-writes). For each moment
the log is replayed onto a copy of the disk from before, up to a flush. The writes between this flush and the next one
are lost, or, at every second moment, the second halves of them. A test marks on the disk how many blocks were
acknowledged to it: see ``crates/kvdepot-tier/tests/slab/crash.rs``.

usage: power_loss.py LOG BEFORE MARK_AT COUNT, where BEFORE is the copy, and MARK_AT the mark's offset in bytes. Prints,
for the last COUNT moments, a file beside BEFORE and how many blocks were acknowledged by then.
"""

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = 0x6A736677736872
FLUSH, FUA, DISCARD = 1, 2, 4
SECTOR = 512
"""Bytes of a sector in the log, whatever the disk has."""
PAGE = 4096


class Entry(NamedTuple):
    """A request: where it writes, and what."""

    at: int
    flags: int
    data: memoryview


def entries(log: memoryview) -> Iterator[Entry]:
    """Yields what the log has, up to its end or the first entry that was being written when QEMU was killed."""
    magic, version, _, sector_bytes = struct.unpack_from("<QQQI", log)
    if (magic, version, sector_bytes) != (MAGIC, 1, SECTOR):
        sys.exit("not a log of blklogwrites, or nothing was flushed: the first flush writes its beginning")
    at = SECTOR
    while at + SECTOR <= len(log):
        sector, sectors, flags, _ = struct.unpack_from("<QQQQ", log, at)
        at += SECTOR
        end = at + sectors * SECTOR
        if (sectors == 0 and flags == 0) or end > len(log):
            return
        if flags & (FUA | DISCARD):
            sys.exit(f"a request that a Slab tier does not make: flags {flags}")
        yield Entry(sector * SECTOR, flags, log[at:end])
        at = end


def replay(before: Path, after: Path, requests: list[Entry]) -> None:
    """Makes a copy of a disk on which these requests were written."""
    subprocess.run(["cp", "--sparse=always", before, after], check=True)
    with after.open("r+b") as disk:
        for request in requests:
            disk.seek(request.at)
            disk.write(request.data)


def main(log_path: str, before_path: str, mark_at: str, count: str) -> None:
    """Makes the files and prints them."""
    found = list(entries(memoryview(Path(log_path).read_bytes())))
    flushes = [number for number, entry in enumerate(found) if entry.flags & FLUSH]
    moments = list(zip(flushes, [*flushes[1:], len(found)], strict=True))
    before = Path(before_path)
    for number, (flush, end) in enumerate(moments[-int(count) :]):
        unsure = [entry for entry in found[flush + 1 : end] if entry.at != int(mark_at)]
        acknowledged = 0
        for entry in found[:end]:
            if entry.at == int(mark_at) and len(entry.data):
                (acknowledged,) = struct.unpack_from("<Q", entry.data)
        after = before.with_name(f"{before.name}.{number}")
        halves = [entry._replace(data=entry.data[: len(entry.data) // 2 // PAGE * PAGE]) for entry in unsure]
        replay(before, after, [*found[: flush + 1], *(halves if number % 2 else [])])
        print(after, acknowledged)


if __name__ == "__main__":
    main(*sys.argv[1:])
