"""Checks of the machine: kernel, memory and its limits, NUMA nodes."""

import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvdepot.checks.finding import Finding
from kvdepot.config import KVDepotConfig
from kvdepot.config.machine import Machine, processor_quota
from kvdepot.config.sizes import GIB
from kvdepot.errors import ConfigError

KERNEL_MIN = (5, 3)
KERNEL_GOOD = (6, 5)
SHARED_MEMORY_MIN_BYTES = GIB
POOL_PART_MAX = 0.8
PROCESSORS_MIN = 1.0


@dataclass(frozen=True)
class Host:
    """The machine as the checks see it. Tests construct their own.

    Attributes:
        kernel: the kernel's release.
        memory_bytes: memory that this process may use.
        locked_max_bytes: limit of locked memory (``ulimit -l``); ``None`` = none.
        shared_bytes: size of ``/dev/shm``; ``None`` = it does not exist.
        root: directory that contains ``proc`` and ``sys``.
        processor_quota: processors that the control groups grant; ``None`` = no quota.
    """

    kernel: str
    memory_bytes: int
    locked_max_bytes: int | None
    shared_bytes: int | None
    root: Path = field(default=Path("/"))
    processor_quota: float | None = None

    @staticmethod
    def here() -> "Host":
        """Returns the machine that this process runs on."""
        import os

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        try:
            shm = os.statvfs("/dev/shm")  # noqa: S108 - asked for its size
            shared = shm.f_blocks * shm.f_frsize
        except OSError:
            shared = None
        locked = None if soft == resource.RLIM_INFINITY else soft
        memory_bytes = Machine.here().memory_bytes
        return Host(os.uname().release, memory_bytes, locked, shared, processor_quota=processor_quota())

    def read(self, path: str) -> str | None:
        """Returns the stripped content of a file below the root; ``None`` if it cannot be read."""
        try:
            return (self.root / path).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None


def check_host(config: KVDepotConfig, host: Host, rdma: bool) -> Iterator[Finding]:
    """Checks the machine.

    Args:
        config: configuration of the depot of this machine.
        host: the machine.
        rdma: whether it has RDMA adapters, which register the pool as locked memory.
    """
    yield _kernel(host)
    try:
        pool_bytes: int | None = config.pool_bytes()
    except ConfigError:
        pool_bytes = None
    yield _processors(host)
    yield _memory(host, pool_bytes)
    yield _locked(host, config.pool_mlock, pool_bytes, rdma)
    yield _huge_pages(host, pool_bytes)
    yield _shared(host)
    yield _numa(host, config)


def _kernel(host: Host) -> Finding:
    match = re.match(r"(\d+)\.(\d+)", host.kernel)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    why = "a depot watches its clients by pidfd (Linux 5.3), and queries the page cache (cachestat, Linux 6.5)"
    if version < KERNEL_MIN:
        return Finding("kernel", "fail", f"Linux {host.kernel}", why, "use Linux 5.3 or later")
    if version < KERNEL_GOOD:
        mend = "nothing needs to be done; before Linux 6.5 reads of cached files may bypass the page cache"
        return Finding("kernel", "warn", f"Linux {host.kernel}", why, mend)
    return Finding("kernel", "ok", f"Linux {host.kernel}", why)


def _processors(host: Host) -> Finding:
    why = (
        "a depot computes checksums and answers engines meanwhile: when its cgroup has used up its quota, all of its "
        "threads stop until the next period, and engines wait"
    )
    quota = host.processor_quota
    if quota is None:
        return Finding("processors", "ok", "no quota of the cgroup", why)
    found = f"the cgroup grants {quota:.2g} processors"
    if quota < PROCESSORS_MIN:
        mend = "raise the cgroup's quota (cpu.max; resources.limits.cpu in Kubernetes, --cpus for docker), or remove it"
        return Finding("processors", "warn", f"{found}, less than {PROCESSORS_MIN:g}", why, mend)
    return Finding("processors", "ok", found, why)


def _memory(host: Host, pool_bytes: int | None) -> Finding:
    why = (
        "the pool is allocated when the depot starts and counts for its cgroup: if it is too large, the depot is killed"
    )
    limit = _gib(host.memory_bytes)
    if pool_bytes is None:
        return Finding("memory", "ok", f"{limit} may be used; an engine sizes the pool by its blocks", why)
    found = f"a pool of {_gib(pool_bytes)}; {limit} may be used by this machine or cgroup"
    if pool_bytes > host.memory_bytes:
        return Finding("memory", "fail", found, why, "lower pool_gb, or raise the cgroup's limit (memory.max)")
    if pool_bytes > POOL_PART_MAX * host.memory_bytes:
        return Finding("memory", "warn", found, why, "lower pool_gb: engine, index and page cache need the rest")
    return Finding("memory", "ok", found, why)


def _locked(host: Host, mlock: bool, pool_bytes: int | None, rdma: bool) -> Finding:
    why = "pool_mlock and RDMA adapters pin the pool's memory, which counts against ulimit -l"
    limit = host.locked_max_bytes
    found = "no limit" if limit is None else f"{_gib(limit)} may be locked"
    if limit is None or pool_bytes is None or limit >= pool_bytes:
        return Finding("memlock", "ok", found, why)
    mend = "ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, or --ulimit memlock=-1 for docker"
    if mlock:
        return Finding("memlock", "fail", f"{found}, and pool_mlock locks {_gib(pool_bytes)}", why, mend)
    if rdma:
        return Finding("memlock", "warn", f"{found}, and an adapter would pin {_gib(pool_bytes)}", why, mend)
    return Finding("memlock", "ok", f"{found}; nothing needs more", why)


def _huge_pages(host: Host, pool_bytes: int | None) -> Finding:
    why = "huge pages avoid page faults when the pool is filled, and speed up registration with GPUs and adapters"
    free = host.read("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    free_bytes = int(free) * (2 << 20) if free and free.isdigit() else 0
    transparent = re.search(r"\[(\w+)\]", host.read("sys/kernel/mm/transparent_hugepage/shmem_enabled") or "")
    mode = transparent[1] if transparent else "not there"
    found = f"{_gib(free_bytes)} of 2 MiB pages are free; transparent ones for shared memory: {mode}"
    if (pool_bytes is not None and free_bytes >= pool_bytes) or mode in ("always", "within_size", "advise", "force"):
        return Finding("huge pages", "ok", found, why)
    mend = "as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or set vm.nr_hugepages"
    return Finding("huge pages", "warn", found, why, mend)


def _shared(host: Host) -> Finding:
    why = "the pool is anonymous memory and needs no space here, but processes of vLLM communicate through /dev/shm"
    if host.shared_bytes is None:
        mend = "mount a tmpfs at /dev/shm"
        return Finding("shared memory", "warn", "there is no /dev/shm", why, mend)
    found = f"{_gib(host.shared_bytes)} at /dev/shm"
    if host.shared_bytes < SHARED_MEMORY_MIN_BYTES:
        mend = "docker run --shm-size 8g (or --ipc host), in Kubernetes an emptyDir of medium Memory"
        return Finding("shared memory", "warn", found, why, mend)
    return Finding("shared memory", "ok", found, why)


def _numa(host: Host, config: KVDepotConfig) -> Finding:
    why = "on several nodes the pool has a region on each, so that a GPU copies from nearby memory"
    nodes = host.read("sys/devices/system/node/online") or "0"
    several = not nodes.isdigit()
    found = f"nodes {nodes}, pool_numa {config.pool_numa}" if several else "one node"
    if config.pool_numa[:1].isdigit() and (missing := _nodes(config.pool_numa) - _nodes(nodes)):
        names = ", ".join(map(str, sorted(missing)))
        return Finding("NUMA", "fail", f"pool_numa {config.pool_numa}, but node {names} is not there", why,
                       f"name nodes of {nodes}, or leave pool_numa out")  # fmt: skip
    return Finding("NUMA", "ok", found, why)


def _nodes(text: str) -> set[int]:
    """Returns the numbers of a list such as ``0,2-3``, ignoring anything else."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (last or first).isdigit():
            found |= set(range(int(first), min(int(last or first), int(first) + 4096) + 1))
    return found


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.1f} MiB"
