"""What has to stand beside a figure: the machine and its load; and how to empty the page cache, file by file."""

import os
import platform
from collections.abc import Iterable
from pathlib import Path


def machine() -> dict[str, object]:
    """The machine in words and numbers."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / (1 << 30), 1),
        "kernel": platform.release(),
    }


def load_average() -> float:
    """Runnable processes over the last minute, this one's included."""
    return round(os.getloadavg()[0], 2)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def drop_from_page_cache(files: Iterable[Path]) -> None:
    """Lets the kernel forget the files' contents, so that the next read comes from the disk (or what lies under it)."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
