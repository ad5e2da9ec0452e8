"""Checks of installed packages, of hashes that must agree between processes, and of running depots."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import Any

from kvdepot import _native
from kvdepot.checks.finding import Finding

PACKAGES = ("vllm", "sglang", "lmcache", "torch")


def installed(package: str) -> str | None:
    """Returns the version of a package in this environment; ``None`` if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_software(
    environ: Mapping[str, str] = os.environ, version: Callable[[str], str | None] = installed
) -> Iterator[Finding]:
    """Checks versions and hash determinism. Imports none of the packages."""
    own, found = version("kvdepot") or _native.__version__, {name: version(name) for name in PACKAGES}
    texts = [f"{name} {number}" if number else f"no {name}" for name, number in found.items()]
    why = "engine and depot must have the same version, and vLLM, SGLang, LMCache and torch are facts of namespaces"
    python = ".".join(map(str, sys.version_info[:3]))
    line = f"kvdepot {own}, {', '.join(texts)}, Python {python}"
    if own.replace("-", "").replace("rc", "") != _native.__version__.replace("-", "").replace("rc", ""):
        mend = "reinstall kvdepot: a library of another version is next to the package"
        yield Finding("versions", "warn", f"{line}; its native library is {_native.__version__}", why, mend)
    else:
        yield Finding("versions", "ok", line, why)
    yield _hashes(environ.get("PYTHONHASHSEED"), lmcache=found["lmcache"] is not None)


def _hashes(seed: str | None, *, lmcache: bool) -> Finding:
    why = "blocks are found by the engine's hashes, which must be the same in every process and after every restart"
    if seed is not None and seed != "random":
        return Finding("hashes", "ok", f"PYTHONHASHSEED={seed}", why)
    found = "PYTHONHASHSEED is not set" if seed is None else "PYTHONHASHSEED=random"
    mend = "export PYTHONHASHSEED=0 for every engine that shares blocks"
    if seed == "random":
        return Finding("hashes", "fail", found, why, mend)
    if lmcache:
        return Finding(
            "hashes", "warn", f"{found}, and LMCache's hashes are valid only within one process without it", why, mend
        )
    why += "; vLLM's default (sha256, 0.29 or later) agrees without it"
    return Finding("hashes", "ok", found, why)


def check_devices(report: Mapping[str, Any], *, rdma_wanted: bool, root: Path = Path("/")) -> Iterator[Finding]:
    """Checks GPU driver and RDMA adapters, given the report of ``_native.describe_devices``.

    Args:
        report: the devices.
        rdma_wanted: whether the configuration asks for copies by an adapter.
        root: directory that contains ``proc`` and ``sys``.
    """
    why = "GPUs need the CUDA driver; engines on CPUs do not"
    if report["devices"]:
        names = ", ".join(one["device"]["name"] for one in report["devices"])
        yield Finding("GPU driver", "ok", f"CUDA {report['driver']}: {names}", why)
    elif report["driver"]:
        mend = "check nvidia-smi and, in a container, that it has devices"
        yield Finding("GPU driver", "warn", f"CUDA {report['driver']}: {report['problem'] or 'no device'}", why, mend)
    else:
        yield Finding("GPU driver", "ok", f"none ({report['problem']})" if report["problem"] else "none", why)
    why = "use_gdr and the network listener's RDMA need an adapter; TCP and local engines do not"
    adapters: Sequence[str] = report["adapters"]
    if adapters:
        yield Finding("RDMA adapters", "ok", ", ".join(adapters), why)
        if report["devices"]:
            yield _peer_memory(root, wanted=rdma_wanted)
        return
    problem = report["adapters_problem"] or "none"
    if rdma_wanted:
        mend = "install rdma-core and its driver, and give /dev/infiniband to the container; or use_gdr: false"
        yield Finding("RDMA adapters", "fail", f"use_gdr is true, and there are none: {problem}", why, mend)
    else:
        yield Finding("RDMA adapters", "ok", f"none: {problem}" if problem != "none" else problem, why)


def _peer_memory(root: Path, *, wanted: bool) -> Finding:
    """Checks whether an adapter may reach a GPU's memory: by the module nvidia_peermem, or as a dma-buf."""
    why = "with use_gdr an adapter copies between pool and GPU, for which the kernel must give it the GPU's memory"
    ways = ["nvidia_peermem"] if (root / "sys/module/nvidia_peermem").is_dir() else []
    try:
        driver = (root / "proc/driver/nvidia/version").read_text("utf-8", "replace")
    except OSError:
        driver = ""
    # Only NVIDIA's open kernel modules export dma-bufs.
    ways += ["dma-buf (open kernel modules)"] if "Open Kernel Module" in driver else []
    if ways:
        return Finding("GPU memory for adapters", "ok", ", ".join(ways), why)
    mend = "modprobe nvidia_peermem, or use NVIDIA's open kernel modules; or use_gdr: false"
    found = "neither nvidia_peermem nor the open kernel modules are loaded"
    return Finding("GPU memory for adapters", "fail" if wanted else "warn", found, why, mend)


def check_depots(depots: Sequence[Mapping[str, Any]], socket: str | None) -> Iterator[Finding]:
    """Reports running depots, each with ``socket``, ``pid`` and ``pipeline``; ``socket`` is the configuration's own."""
    why = "engines with this configuration attach to the depot at its socket, or start it"
    if not depots:
        yield Finding("depots", "ok", "none runs", why)
        return
    texts = [f"pid {one['pid'] or '?'} ({one['pipeline']})" for one in depots]
    if socket is not None:
        here = any(one["socket"] == socket for one in depots)
        texts.append(f"{'one' if here else 'none'} with this configuration")
    yield Finding("depots", "ok", ", ".join(texts), why)


@dataclass(frozen=True)
class DirectoryUser:
    """A depot with a Posix tier: a running one, or the one that a configuration would start.

    Attributes:
        name: how people find it.
        directories: its directories, with links resolved.
        one_limit: whether it keeps one limit with all depots that use them (``posix_capacity_shared``).
    """

    name: str
    directories: tuple[str, ...]
    one_limit: bool


def check_shared_directories(users: Sequence[DirectoryUser]) -> Iterator[Finding]:
    """Reports pairs of depots that use one directory without a common limit; nothing with fewer than two depots."""
    why = (
        "each depot counts only what it writes itself, so together they exceed posix_capacity_gb, and each has its own "
        "pool: blocks in the memory of one are misses for engines of the other"
    )
    mend = (
        "give engines that shall share a pool the same configuration; or set posix_capacity_shared for both; or give "
        "them different directories"
    )
    texts = []
    for one, other in combinations(users, 2):
        both = [path for path in one.directories if path in other.directories]
        if both and not (one.one_limit and other.one_limit):
            texts.append(f"{one.name} and {other.name} both use {', '.join(both)}")
    if texts:
        yield Finding("shared directories", "warn", "; ".join(texts), why, mend)
    elif len(users) > 1:
        yield Finding("shared directories", "ok", "no two depots use one directory without a common limit", why)
