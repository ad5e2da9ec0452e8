"""fio as the yardstick of the disk: it writes and reads the same bytes, in files of a block or of a thread."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benches.peers.work import MIB, Shape
from tools.lab.child import ChildError
from tools.lab.machine import drop_from_page_cache

THREADS = 4


@dataclass(frozen=True)
class Took:
    """What fio took for all bytes."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Fio:
    """A way in which fio writes and reads a shape's bytes.

    Attributes:
        directory: for its files.
        shape: how much, in pieces of a block.
        file_per_block: whether a block has a file of its own; otherwise a thread has one.
        direct: whether writes bypass the page cache. Reads always do.
        synced: whether writes through the page cache are synced, each file at its end. Others always are.
    """

    directory: Path
    shape: Shape
    file_per_block: bool
    direct: bool
    synced: bool = False

    def write(self) -> Took:
        """Creates the files and writes them."""
        more = ["--end_fsync=1"] if self.direct or self.synced else []
        return self._run("write", direct=self.direct, more=more)

    def read(self) -> Took:
        """Reads the files from the disk."""
        drop_from_page_cache(path for path in self.directory.rglob("*") if path.is_file())
        return self._run("read", direct=True)

    def _run(self, kind: str, *, direct: bool, more: "list[str] | tuple[str, ...]" = ()) -> Took:
        fio = shutil.which("fio")
        assert fio is not None
        files = max(1, self.shape.blocks // THREADS)
        size = self.shape.block_bytes * (1 if self.file_per_block else files)
        command = [
            fio,
            "--name=blocks",
            f"--directory={self.directory}",
            f"--rw={kind}",
            f"--numjobs={THREADS}",
            "--thread",
            f"--nrfiles={files if self.file_per_block else 1}",
            f"--filesize={size}",
            f"--bs={min(self.shape.block_bytes, 4 * MIB)}",
            "--ioengine=psync",
            f"--direct={int(direct)}",
            "--fallocate=none",
            # Otherwise files are created before the time is taken.
            f"--create_on_open={int(kind == 'write')}",
            "--file_service_type=sequential",
            "--group_reporting",
            "--output-format=json",
            *more,
        ]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise ChildError(f"fio ended with status {done.returncode}: {done.stderr.strip()}")
        job: dict[str, Any] = json.loads(done.stdout)["jobs"][0]
        found = job[kind]
        share = self.shape.bytes / found["io_bytes"]
        # The runtime of all threads, in milliseconds, and the mean share of a processor that one of them used.
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        return Took(found["runtime"] / 1e3 * share, cpu_s * share)


class Installed:
    """The fio that is installed, if one is."""

    name = "fio"
    missing = "not installed (Debian: fio)"

    @cached_property
    def version(self) -> str | None:
        """Its version; None if it is not installed."""
        fio = shutil.which("fio")
        if fio is None:
            return None
        return subprocess.run([fio, "--version"], check=True, capture_output=True, text=True).stdout.strip()


FIO = Installed()
