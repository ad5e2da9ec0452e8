"""The second levels: kvdepot's plug-in, and LMCache's own adapters, each with its files or its medium."""

import os
import shlex
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from benches.peers.lab import write_zeros
from benches.peers.work import GIB
from tools.lab.depot import Depot, DepotHome
from tools.lmcache.server import depot_adapter

CORES = len(os.sched_getaffinity(0))
DRAIN_S = 300.0


@dataclass(frozen=True)
class Place:
    """Where levels write.

    Attributes:
        disk: directory on a disk, for files, configurations and logs.
        memory: directory on tmpfs, for files that stand for DAX devices.
        commands: of all programs that were started, by what they were started for; they are reported.
    """

    disk: Path
    memory: Path
    commands: dict[str, str] = field(default_factory=dict)

    def note(self, measurement: str, title: str, words: Sequence[str]) -> None:
        """Notes a command; ports and directories are those of the last round."""
        self.commands[f"{measurement}, {title}"] = shlex.join(words)


@dataclass(frozen=True)
class Sizes:
    """Sizes of all levels of one measurement.

    Attributes:
        l1_bytes: LMCache's own memory above kvdepot. Above other levels it has ``pool_bytes`` in addition.
        pool_bytes: kvdepot's own memory.
        medium_bytes: of the file that stands for a DAX device.
        chunk_bytes: of one of LMCache's objects.
    """

    l1_bytes: int
    pool_bytes: int
    medium_bytes: int
    chunk_bytes: int

    @property
    def whole_bytes(self) -> int:
        """Memory of every side, whichever way it is divided."""
        return self.l1_bytes + self.pool_bytes


class Level(ABC):
    """A second level with empty files, which outlive its processes. They are removed with the ``with`` block."""

    name: ClassVar[str]
    title: ClassVar[str]
    ours: ClassVar[bool] = False

    def __init__(self, place: Place, sizes: Sizes, settings: Mapping[str, Any]) -> None:
        self.sizes = sizes
        self.root = place.disk / self.name
        self.medium = place.memory / f"{self.name}.medium"
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        self.prepare(settings)

    @property
    def l1_gb(self) -> float:
        """LMCache's own memory."""
        return (self.sizes.l1_bytes if self.ours else self.sizes.whole_bytes) / GIB

    @abstractmethod
    def prepare(self, settings: Mapping[str, Any]) -> None:
        """Makes what has to be there before the server starts; ``settings`` are keys of kvdepot's configuration."""

    @abstractmethod
    def adapter(self) -> dict[str, Any]:
        """Returns the value of ``--l2-adapter``."""

    def start(self) -> AbstractContextManager["Depot | None"]:
        """Starts the process that the level needs besides LMCache's server."""
        return nullcontext()

    def files(self) -> list[Path]:
        """Returns its files on the disk."""
        return [path for path in (self.root / "blocks").rglob("*") if path.is_file()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.medium.unlink(missing_ok=True)
        shutil.rmtree(self.root / "blocks", ignore_errors=True)


class Kvdepot(Level):
    """A depot below LMCache's server."""

    ours = True
    pipeline: ClassVar[str]

    def prepare(self, settings: Mapping[str, Any]) -> None:
        """Writes the configuration, which depot and plug-in read."""
        values = {"pipeline": self.pipeline, "pool_gb": round(self.sizes.pool_bytes / GIB, 4), **self.place_of_blocks()}
        self.home = DepotHome(self.root, {**values, **settings})

    def place_of_blocks(self) -> dict[str, Any]:
        """Returns the keys that say where the tier has its blocks."""
        return {}

    def adapter(self) -> dict[str, Any]:
        """Returns the plug-in with the depot's own file."""
        return depot_adapter({"config": str(self.home.config)})

    def start(self) -> AbstractContextManager[Depot | None]:
        """Starts the depot."""
        return self.home.start()

    def __exit__(self, *exc: object) -> None:
        """Removes the depot's files."""
        self.home.remove()
        super().__exit__(*exc)


class KvdepotPosix(Kvdepot):
    """Files of blocks."""

    name = "kvdepot-posix"
    title = "kvdepot, Cache|Posix"
    pipeline = "Cache|Posix"


class KvdepotDax(Kvdepot):
    """A file that stands for a DAX device."""

    name = "kvdepot-dax"
    title = "kvdepot, Cache|Dax"
    pipeline = "Cache|Dax"

    def place_of_blocks(self) -> dict[str, Any]:
        """Makes the medium."""
        write_zeros(self.medium, self.sizes.medium_bytes)
        return {"dax_device_path": str(self.medium), "directories": None}


class LMCacheFs(Level):
    """LMCache's files, written and read by Python."""

    name = "lmcache-fs"
    title = "LMCache, fs"
    type = "fs"

    def prepare(self, settings: Mapping[str, Any]) -> None:  # noqa: ARG002 - of kvdepot only
        """Makes the directory."""
        (self.root / "blocks").mkdir()

    def adapter(self) -> dict[str, Any]:
        """Returns LMCache's defaults."""
        return {"type": self.type, "base_path": str(self.root / "blocks")}


class LMCacheFsNative(LMCacheFs):
    """LMCache's files, written and read by four threads in C++."""

    name = "lmcache-fs-native"
    title = "LMCache, fs_native"
    type = "fs_native"


class LMCacheDax(Level):
    """LMCache's slots in a file that stands for a DAX device; as many threads store and load as there are cores."""

    name = "lmcache-dax"
    title = "LMCache, dax"

    def prepare(self, settings: Mapping[str, Any]) -> None:  # noqa: ARG002 - of kvdepot only
        """Makes the medium."""
        write_zeros(self.medium, self.sizes.medium_bytes)

    def adapter(self) -> dict[str, Any]:
        """Returns slots that are as large as an object."""
        return {
            "type": "dax",
            "device_path": str(self.medium),
            "max_dax_size_gb": self.sizes.medium_bytes / GIB,
            "slot_bytes": self.sizes.chunk_bytes,
            "num_store_workers": CORES,
            "num_load_workers": CORES,
        }


LEVELS: dict[str, type[Level]] = {
    one.name: one for one in (KvdepotPosix, KvdepotDax, LMCacheFs, LMCacheFsNative, LMCacheDax)
}
