"""Facts to report with a figure: the machine and its load. Also drops files from the page cache."""

import os
import platform
from collections.abc import Iterable
from pathlib import Path


def machine() -> dict[str, object]:
    """Returns a description of the machine."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / (1 << 30), 1),
        "kernel": platform.release(),
    }


def load_average() -> float:
    """Returns the number of runnable processes over the last minute, including this one's."""
    return round(os.getloadavg()[0], 2)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def drop_from_page_cache(files: Iterable[Path]) -> None:
    """Drops the files' contents from the page cache, so that the next read comes from the disk (or what is below)."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
