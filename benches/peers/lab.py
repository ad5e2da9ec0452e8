"""What the comparisons share: environments of peers, processes of sides, and the state of the page cache."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benches.peers.work import MIB, Shape
from tools.lab.child import ChildError
from tools.lab.rounds import ROOT, Rounds

SEED = 1
PROBE_S = 240
JUNK_PART = 1.2
CANNOT_RUN = "cannot-run"


@dataclass(frozen=True)
class Environment:
    """An environment of a peer, which a target of make creates.

    Attributes:
        name: of the peer, for people.
        directory: of the environment, relative to the root of the repository.
        target: of make that creates it.
        probe: Python code that prints the peer's version.
        environ: variables of its processes, as they depend on the environment's directory.
    """

    name: str
    directory: str
    target: str
    probe: str
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """Its directory."""
        return ROOT / self.directory

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.root / "bin" / "python"

    @property
    def variables(self) -> dict[str, str]:
        """Variables of its processes."""
        return {name: value.format(root=self.root) for name, value in self.environ.items()}

    @cached_property
    def version(self) -> str | None:
        """The peer's version; None if it cannot run here, and `missing` says why."""
        if not self.python.exists() or (self.root / CANNOT_RUN).exists():
            return None
        found = self._probed
        return found.stdout.strip().splitlines()[-1] if found.returncode == 0 and found.stdout.strip() else None

    @property
    def missing(self) -> str:
        """Why the peer cannot run here."""
        if not self.python.exists():
            return f"not installed: run make {self.target}"
        with suppress(FileNotFoundError):
            return (self.root / CANNOT_RUN).read_text().strip()
        lines = self._probed.stderr.strip().splitlines() or ["it says nothing"]
        return f"cannot be imported: {lines[-1]}"

    @cached_property
    def _probed(self) -> "subprocess.CompletedProcess[str]":
        environ = {**os.environ, **self.variables}
        command = [str(self.python), "-c", self.probe]
        try:
            return subprocess.run(
                command, capture_output=True, text=True, env=environ, cwd=ROOT, timeout=PROBE_S, check=False
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", f"takes longer than {PROBE_S} s")


@dataclass(frozen=True)
class Place:
    """Where a run writes.

    Attributes:
        disk: directory on the disk that is measured.
        memory: directory on tmpfs, for media that stand for memory.
        logs: directory of the sides' logs.
    """

    disk: Path
    memory: Path
    logs: Path


class Process(Rounds):
    """One side as a process with an open store."""

    def __init__(
        self, module: str, shape: Shape, settings: Mapping[str, Any], logs: Path, environment: Environment | None = None
    ) -> None:
        python = str(environment.python) if environment else sys.executable
        variables = environment.variables if environment else {}
        name = module.rpartition(".")[2]
        super().__init__(name, [python, "-m", module], logs / f"{name}.log", variables)
        self._shape = shape
        try:
            sizes = [shape.shard_kib, shape.shards, shape.blocks]
            self.opened = self.ask("open", shape=sizes, seed=SEED, settings=dict(settings))
        except BaseException:
            self.kill()
            raise

    def ask(self, op: str, **asked: Any) -> dict[str, Any]:
        """Returns the answer to a request.

        Raises:
            ChildError: the side failed; the message has the end of its log.
        """
        try:
            return self.round({"op": op, **asked})
        except BrokenPipeError as error:
            raise ChildError(f"{self.name} ended: see {self.log}") from error


def gb_s(shape: Shape, seconds: float) -> float:
    """Returns a rate in GB/s."""
    return shape.bytes / 1e9 / seconds


def s_per_gb(shape: Shape, seconds: float) -> float:
    """Returns processor seconds per GB."""
    return seconds / (shape.bytes / 1e9)


def prepare_page_cache(directory: Path, nbytes: int) -> None:
    """Makes the system hold enough free memory for the page cache of what comes next.

    A virtual machine may have returned its free memory to the host. Page cache that has to come from the host costs up
    to ten times more, whichever side happens to need it. So a file of somewhat more than the size is written to
    the page cache and removed. Processes take their own memory first.
    """
    path = directory / "junk"
    write_zeros(path, int(nbytes * JUNK_PART))
    path.unlink()


def write_zeros(path: Path, nbytes: int) -> None:
    """Creates a file of zeros, rounded up to whole MiB, none of them a hole."""
    chunk = bytes(MIB)
    with path.open("wb") as file:
        for _ in range(-(-nbytes // MIB)):
            file.write(chunk)


@contextmanager
def removed_at_the_end(directory: Path) -> Iterator[Path]:
    """Creates a directory, and removes it with what is below it."""
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
