"""What the Rust core is told: sizes in bytes, decided on the machine that the depot runs on."""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.config.environment import log_level
from kvdepot.config.machine import Machine
from kvdepot.config.placement import placement_of
from kvdepot.config.problem import Problem
from kvdepot.config.sizes import BLOCK_ALIGN_BYTES, GIB
from kvdepot.config.tier_core import tier_object, tiers_in_use
from kvdepot.errors import config_error

if TYPE_CHECKING:
    from kvdepot.config.model import KVDepotConfig

POOL_GIB_DEFAULT = 256
POOL_SLOTS_DEFAULT = 4096
MEMORY_PART = 2
USE_GDR: dict[bool | str, str] = {True: "yes", False: "no", "auto": "auto"}


@dataclass(frozen=True)
class Size:
    """A size in bytes, and whether the machine had a say in it."""

    bytes: int
    from_machine: bool = False


def pool_size(config: "KVDepotConfig", block_bytes: int | None, machine: Machine) -> Size:
    """Size of the pool.

    Raises:
        ConfigError: larger than the machine's memory, or sized in blocks and ``block_bytes`` is missing.
    """
    problem = memory_problem(config, machine, block_bytes or 1)
    if problem:
        where = config.origins.get(problem.key, "argument")
        raise config_error(f"{where}: {problem.key}: {problem.text}, got {getattr(config, problem.key)}")
    half = Size(machine.memory_bytes // MEMORY_PART // BLOCK_ALIGN_BYTES * BLOCK_ALIGN_BYTES, from_machine=True)
    if config.pool_gb is not None:
        return Size(int(config.pool_gb * GIB))
    if config.pool != "Staging":
        return min(Size(POOL_GIB_DEFAULT * GIB), half, key=lambda size: size.bytes)
    if block_bytes is None:
        raise config_error(
            f"the pool of {config.pipeline} is sized in blocks, whose size only an engine knows: "
            "write pool_gb to run it without one"
        )
    slot_bytes = -(-block_bytes // BLOCK_ALIGN_BYTES) * BLOCK_ALIGN_BYTES
    if config.pool_slots is not None:
        return Size(config.pool_slots * slot_bytes)
    return min(Size(POOL_SLOTS_DEFAULT * slot_bytes), half, key=lambda size: size.bytes)


def memory_problem(config: "KVDepotConfig", machine: Machine, block_bytes: int = 1) -> Problem | None:
    """What is wrong with a pool that was sized explicitly; ``None`` when it fits the machine's memory."""
    slot_bytes = -(-block_bytes // BLOCK_ALIGN_BYTES) * BLOCK_ALIGN_BYTES
    if config.pool_gb is not None:
        name, size_bytes = "pool_gb", int(config.pool_gb * GIB)
    elif config.pool_slots is not None:
        name, size_bytes = "pool_slots", config.pool_slots * slot_bytes
    else:
        return None
    if size_bytes <= machine.memory_bytes:
        return None
    return Problem(
        name,
        f"makes a pool of {size_bytes / GIB:.1f} GiB, but there are {machine.memory_bytes / GIB:.1f} GiB of memory: "
        "write less, or remove the key to have half of it",
    )


def core_json(config: "KVDepotConfig", block_bytes: int | None, machine: Machine) -> str:
    """The JSON object that the Rust core reads, keys in a fixed order."""
    return json.dumps(_core_object(config, block_bytes, machine, identity=False), separators=(",", ":"))


def identity_json(config: "KVDepotConfig", block_bytes: int | None, machine: Machine) -> str:
    """``core_json`` without the sizes that the machine decides, which may change from one minute to the next."""
    return json.dumps(_core_object(config, block_bytes, machine, identity=True), separators=(",", ":"))


def _core_object(config: "KVDepotConfig", block_bytes: int | None, machine: Machine, identity: bool) -> object:
    def size(found: Size) -> int | None:
        return None if identity and found.from_machine else found.bytes

    whole: dict[str, object] = {
        "pipeline": config.pipeline,
        "pool_bytes": size(pool_size(config, block_bytes, machine)),
        "eviction": config.eviction,
        "waiting_queue_depth": config.waiting_queue_depth,
        "running_queue_depth": config.running_queue_depth,
        "timeout_ms": config.timeout_ms,
    }
    if not identity:
        # How a depot gets its memory, and how it ends, do not make it another depot.
        whole["drain_timeout_ms"] = config.drain_timeout_s * 1000
        whole["pool_keep_ms"] = config.pool_keep_s * 1000
        if config.pool_keep_s:
            whole["pool_keeper"] = [sys.executable, "-c", "from kvdepot._native import keep_pool; keep_pool()"]
        whole["pool_mlock"] = config.pool_mlock
        whole["pool_numa"] = config.pool_numa
        whole["pool_populate_threads"] = config.pool_populate_threads
    placement = {tier: said for tier in config.tiers if (said := placement_of(config, tier))}
    if placement:
        whole["placement"] = placement
    for tier in tiers_in_use(config):
        whole[tier.section] = tier_object(config, tier, machine, identity)
    return whole


def depot_command(config: "KVDepotConfig", socket: str, block_bytes: int | None, machine: Machine) -> list[str]:
    """The command that starts the depot; sizes are decided here, so that engine and depot agree on them."""
    level, _ = log_level(config.log_level, machine.environ)
    return [
        sys.executable,
        "-m",
        "kvdepot",
        "serve",
        "--detach",
        "--core-json",
        core_json(config, block_bytes, machine),
        "--socket",
        socket,
        "--idle-exit-s",
        str(config.idle_exit_s),
        "--log-level",
        level,
        "--log-file",
        f"{socket}.log",
    ]


def copy_json(config: "KVDepotConfig", cuda_device: int | None, machine: Machine) -> str:
    """What the core makes a copy engine from; measurements of devices are kept in the user's cache directory."""
    copy = {
        "cuda_device": cuda_device,
        "copy_engine": config.copy_engine,
        "copy_threads": config.copy_threads,
        "use_gdr": USE_GDR[config.use_gdr],
        "gdr_nics": list(config.gdr_nics or ()),
        "cache_dir": machine.device_cache_directory() if cuda_device is not None else None,
    }
    return json.dumps(copy, sort_keys=True)
