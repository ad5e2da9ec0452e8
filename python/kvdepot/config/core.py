"""The configuration as the Rust core reads it: sizes in bytes, decided on the machine that the depot runs on."""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.config.environment import log_settings
from kvdepot.config.machine import Machine
from kvdepot.config.placement import placement_of
from kvdepot.config.problem import Problem
from kvdepot.config.sizes import BLOCK_ALIGN_BYTES, GIB
from kvdepot.config.tier_core import tier_object, tiers_in_use
from kvdepot.errors import ConfigError

if TYPE_CHECKING:
    from kvdepot.config.model import KVDepotConfig

POOL_GIB_DEFAULT = 256
POOL_SLOTS_DEFAULT = 4096
MEMORY_PART = 2
USE_GDR: dict[bool | str, str] = {True: "yes", False: "no", "auto": "auto"}


@dataclass(frozen=True)
class Size:
    """A size in bytes, and whether it was derived from the machine."""

    bytes: int
    from_machine: bool = False


def pool_size(config: "KVDepotConfig", block_bytes: int | None, machine: Machine) -> Size:
    """Returns the size of the pool on its owner's machine.

    Raises:
        ConfigError: it is larger than the machine's memory, or is given in blocks and ``block_bytes`` is missing.
    """
    problem = memory_problem(config, machine, block_bytes or 1)
    if problem:
        where = config.origins.get(problem.key, "argument")
        raise ConfigError(f"{where}: {problem.key}: {problem.text}, got {getattr(config, problem.key)}")
    half = Size(machine.memory_bytes // MEMORY_PART // BLOCK_ALIGN_BYTES * BLOCK_ALIGN_BYTES, from_machine=True)
    said = _said_bytes(config, block_bytes)
    wanted = Size(POOL_GIB_DEFAULT * GIB if said is None else said)
    if config.pool_gb is not None or config.pool_slots is not None:
        return wanted
    return min(wanted, half, key=lambda size: size.bytes)


def _said_bytes(config: "KVDepotConfig", block_bytes: int | None) -> int | None:
    """Returns the pool's bytes by the configuration alone, on any machine; ``None`` if they depend on the machine."""
    if config.pool_gb is not None:
        return int(config.pool_gb * GIB)
    if config.pool != "Staging":
        return None
    if block_bytes is None:
        raise ConfigError(
            f"the pool of {config.pipeline} is sized in blocks, whose size only an engine knows: "
            "write pool_gb to run it without one"
        )
    slot_bytes = -(-block_bytes // BLOCK_ALIGN_BYTES) * BLOCK_ALIGN_BYTES
    return (config.pool_slots or POOL_SLOTS_DEFAULT) * slot_bytes


def memory_problem(config: "KVDepotConfig", machine: Machine, block_bytes: int = 1) -> Problem | None:
    """Returns the problem of a pool with an explicit size; ``None`` if it fits the machine's memory."""
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
        "write less, or remove the key to use half of it",
    )


def core_json(config: "KVDepotConfig", block_bytes: int | None, machine: Machine) -> str:
    """Returns the JSON object that the Rust core reads, with keys in a fixed order."""
    return json.dumps(_core_object(config, block_bytes, machine, identity=False), separators=(",", ":"))


def identity_json(config: "KVDepotConfig", block_bytes: int | None, machine: Machine) -> str:
    """Returns what distinguishes depots from one another: engines for which it is equal share a depot.

    It covers what the depot holds and where: pipeline, size of the pool if explicit, eviction, tiers. Sizes derived
    from the machine are excluded: they may change from one minute to the next, and an engine's container may be smaller
    than the depot's. Nothing is checked against this machine either.
    """
    return json.dumps(_core_object(config, block_bytes, machine, identity=True), separators=(",", ":"))


def _core_object(config: "KVDepotConfig", block_bytes: int | None, machine: Machine, identity: bool) -> object:
    pool_bytes = _said_bytes(config, block_bytes) if identity else pool_size(config, block_bytes, machine).bytes
    whole: dict[str, object] = {
        "pipeline": config.pipeline,
        "pool_bytes": pool_bytes,
        "eviction": config.eviction,
    }
    if not identity:
        # Engines' timeouts and queues, and how a depot gets its memory and exits, are not part of its identity.
        whole["waiting_queue_depth"] = config.waiting_queue_depth
        whole["running_queue_depth"] = config.running_queue_depth
        whole["timeout_ms"] = config.timeout_ms
        whole["drain_timeout_ms"] = config.drain_timeout_s * 1000
        whole["pool_keep_ms"] = config.pool_keep_s * 1000
        if config.pool_keep_s:
            whole["pool_keeper"] = [sys.executable, "-c", "from kvdepot._native import keep_pool; keep_pool()"]
        whole["evicted_blocks_remembered"] = config.evicted_blocks_remembered
        if config.metrics_port is not None:
            whole["metrics_port"] = config.metrics_port
        # Without a port, too: `kvdepot serve --metrics-port` adds one.
        whole["metrics_host"] = config.metrics_host
        if config.metrics_token_file is not None:
            whole["metrics_token_file"] = config.metrics_token_file
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
    """Returns the command that starts the depot. Sizes are decided here, so that engine and depot agree on them."""
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
        *log_settings(config, machine.environ).to_options(),
        "--log-file",
        f"{socket}.log",
    ]


def copy_json(config: "KVDepotConfig", cuda_device: int | None, machine: Machine) -> str:
    """Returns the JSON from which the core creates a copy engine; measurements go to the user's cache directory."""
    copy = {
        "cuda_device": cuda_device,
        "copy_engine": config.copy_engine,
        "copy_engines_forbidden": list(config.copy_engines_forbidden or ()),
        "copy_threads": config.copy_threads,
        "use_gdr": USE_GDR[config.use_gdr],
        "gdr_nics": list(config.gdr_nics or ()),
        "cache_dir": machine.device_cache_directory() if cuda_device is not None else None,
    }
    return json.dumps(copy, sort_keys=True)
