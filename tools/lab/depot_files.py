"""A depot that engines start themselves, seen from outside: its gauges, its process, its files."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tools.lab.child import POLL_S
from tools.lab.depot import depot_stats

GIB = 1 << 30
HEADER_BYTES = 4096
QUIET_S = 60.0
QUIET_GAUGES = (
    "claims_open",
    "claims_queued",
    "fetches_queued",
    "pool_dirty_bytes",
    "pool_fetching_bytes",
    "pool_filling_bytes",
    "pool_leased_bytes",
    "writes_queued",
)
BLOCK_SUFFIX = ".kvb"
TEMPORARY_PREFIX = ".tmp-"
BAD_WORDS = ("panicked", "assertion", "Traceback")


class LeakError(Exception):
    """Something unused is left over, or a cap is exceeded."""


class DepotFiles:
    """One depot's socket, log and directory, and their invariants."""

    def __init__(self, root: Path, block_bytes: int, pool_blocks: int, tier_blocks: int) -> None:
        self.socket = root / "depot.sock"
        self.blocks = root / "blocks"
        self.blocks.mkdir()
        self._block_bytes = block_bytes
        self.bytes_max = tier_blocks * (block_bytes + HEADER_BYTES)
        self.bytes_seen_max = 0
        self.temporaries_seen = 0
        self.options: dict[str, Any] = {
            "socket": str(self.socket),
            "pipeline": "Cache|Posix",
            "directories": [str(self.blocks)],
            "pool_gb": pool_blocks * block_bytes / GIB,
            "posix_capacity_gb": self.bytes_max / GIB,
            # A timeout is a miss, which is correct for users, but here a miss proves nothing.
            "call_timeout_ms": 30_000,
            "attach_timeout_ms": 30_000,
        }

    def stats(self) -> dict[str, Any] | None:
        """Returns the depot's gauges; None if no depot answers."""
        return depot_stats(self.socket)

    def kill(self) -> bool:
        """Sends SIGKILL to the depot. Returns false if there is none."""
        stats = self.stats()
        if stats is None:
            return False
        try:
            os.kill(int(stats["pid"]), signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def check_caps(self) -> None:
        """Checks that files never exceed the cap, including temporary ones (P5).

        A depot may remove files and write others while the directory is walked: only those count that are still there
        afterwards, under whatever name, since they all were there at one moment.

        Raises:
            LeakError: they do.
        """
        # A temporary file becomes a block, and a block that is written over becomes a temporary file.
        seen = {(stat.st_dev, stat.st_ino): (path, stat) for path, stat in self._files()}
        there = {(stat.st_dev, stat.st_ino) for _, stat in self._files()}
        found = 0
        for path, stat in (file for inode, file in seen.items() if inode in there):
            if path.name.endswith(BLOCK_SUFFIX) or path.name.startswith(TEMPORARY_PREFIX):
                found += max(stat.st_size, stat.st_blocks * 512)
                self.temporaries_seen += path.name.startswith(TEMPORARY_PREFIX)
        self.bytes_seen_max = max(self.bytes_seen_max, found)
        if found > self.bytes_max:
            raise LeakError(f"{found} bytes are in {self.blocks}, {self.bytes_max} are allowed")

    def wait_until_quiet(self) -> None:
        """Waits until the depot holds nothing for any client, then checks its content and its directory (P4, P5).

        Raises:
            LeakError: something is left over.
        """
        end_s = time.monotonic() + QUIET_S
        stats = None
        while stats is None or any(stats[name] for name in QUIET_GAUGES):
            if time.monotonic() > end_s:
                held = {name: stats[name] for name in QUIET_GAUGES if stats[name]} if stats is not None else "no depot"
                raise LeakError(f"after {QUIET_S:.0f} s the depot still holds {held}")
            time.sleep(POLL_S)
            stats = self.stats()
        used = stats["pool_bytes"] - stats["pool_free_bytes"]
        if used != stats["pool_blocks"] * self._block_bytes:
            raise LeakError(f"{used} bytes of the pool are taken by {stats['pool_blocks']} blocks")
        self.check_caps()
        while (problem := self._difference(stats["tiers"][0])) is not None:
            # A thread of the tier may still be removing files that no longer count.
            if time.monotonic() > end_s:
                raise LeakError(problem)
            time.sleep(POLL_S)
            stats = self.stats() or stats

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Yields every file below the directory, except files and directories that vanish in the meantime."""
        for place, _, names in os.walk(self.blocks):
            for name in names:
                path = Path(place, name)
                with suppress(FileNotFoundError):
                    yield path, path.lstat()

    def _difference(self, tier: dict[str, Any]) -> str | None:
        """Returns a difference between the directory and the tier's own counts."""
        found = [(path.name, stat.st_size) for path, stat in self._files()]
        if temporaries := [name for name, _ in found if name.startswith(TEMPORARY_PREFIX)]:
            return f"temporary files in {self.blocks} after all is written: {temporaries[:4]}"
        sizes = [size for name, size in found if name.endswith(BLOCK_SUFFIX)]
        if (len(sizes), sum(sizes)) != (tier["blocks"], tier["bytes"]):
            return f"{len(sizes)} block files of {sum(sizes)} bytes, and the depot counts {tier}"
        return None

    def check_log(self) -> None:
        """Checks that the depot's log reports no bug.

        Raises:
            LeakError: it does.
        """
        log = Path(f"{self.socket}.log")
        if log.exists():
            text = log.read_text(errors="replace")
            found = [line for line in text.splitlines() if any(word in line for word in BAD_WORDS)]
            if found:
                raise LeakError(f"{log} says: {found[0]}")
