"""Keys of the ``Posix`` tier: block files on local disks and mounts."""

import os
from typing import Literal

from pydantic import BaseModel, field_validator

from kvdepot.config.depot_keys import GIB_MAX
from kvdepot.config.keys import key
from kvdepot.config.placement import PROMOTE, WRITE, WriteWhen

IO_THREADS_MAX = 256


class PosixKeys(BaseModel):
    """Block files on local disks and mounts."""

    directories: tuple[str, ...] | None = key(
        None,
        "Directories of the `Posix` tier, absolute, as a list or separated by `:`; local disks or mounts.",
        seeds=["storage_backends"],
        by_default="`kvdepot` in the user's cache directory",
    )
    posix_capacity_gb: float | None = key(
        None,
        "Cap of the `Posix` tier over all its directories; blocks long unused make room. 0 = no cap.",
        unit="GiB",
        seeds=["posix_capacity_gb"],
        by_default="80 % of the disks' size; in the default directory a tenth of the disk's free space",
        ge=0,
        le=GIB_MAX,
    )
    posix_free_floor_percent: int = key(
        2,
        "Share of each disk that stays free, whoever fills it. Below it the `Posix` tier evicts blocks, and stores no "
        "more when it has none left on that disk. 0 = fill the disk.",
        unit="%",
        ge=0,
        le=100,
    )
    io_direct: Literal[True, False, "auto"] = key(
        "auto",
        "Read and write block files past the page cache (O_DIRECT). With `auto` only reads of files that the page "
        "cache does not hold go past it.",
        seeds=["io_direct"],
    )
    io_engine: Literal["psync", "aio", "io_uring"] = key(
        "psync",
        "How block files are read and written.",
        seeds=["posix_io_engine"],
        only=["psync"],
        instead="write psync or remove the key",
    )
    io_read_threads: int = key(
        8,
        "Threads that read block files.",
        unit="threads",
        seeds=["stream_number"],
        ge=1,
        le=IO_THREADS_MAX,
    )
    io_write_threads: int = key(
        4,
        "Threads that write block files. In files with `ucm_connectors`: half of `stream_number`, rounded up.",
        unit="threads",
        ge=1,
        le=IO_THREADS_MAX,
    )
    shard_directories: bool = key(
        True,
        "Spread block files over subdirectories; false keeps a namespace's in one.",
        seeds=["shard_data_dir"],
    )
    durable: bool = key(False, "Flush every block file to the medium before it counts as written.")
    directories_shared: bool = key(
        True,
        "Other nodes may write to the same directories, so a block that is not known may still be there.",
    )
    posix_write: WriteWhen = key("through", WRITE.format(tier="Posix"))
    posix_promote: bool = key(False, PROMOTE.format(tier="Posix"))

    @field_validator("directories", mode="before")
    @classmethod
    def _split_paths(cls, value: object) -> object:
        """``"/a:/b"`` and ``["/a", "/b"]`` mean the same directories; ``~`` is the user's home."""
        parts = value.split(":") if isinstance(value, str) else value
        if not isinstance(parts, list):
            return parts
        return tuple(os.path.expanduser(part) if isinstance(part, str) else part for part in parts)
