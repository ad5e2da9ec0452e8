"""Engines as child processes: their plans, connectors and results."""

import atexit
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from tools.lab.child import ChildError, tail
from tools.lab.depot import DepotHome
from tools.lab.models import ROOT, WORK, ModelSize
from tools.lab.warm import ON_ALL_CORES, Warm

BLOCK_TOKENS = 32
RUN_S = 900.0
WARM_UP_TOKENS = 1025
MARGIN_TOKENS = 64
"""Tokens that a request may have beyond its prompt."""
POOL_MARGIN_BYTES = 256 << 20
READ_THREADS, WRITE_THREADS = 8, 4
"""Threads of vLLM's file tier: as many as kvdepot has by default."""

Step = dict[str, Any]
Prompts = Sequence[tuple[int, ...]]
"""Seed and length of each prompt; a prompt of several parts has a seed and a length for each part."""


@dataclass(frozen=True)
class Device:
    """What engines compute on.

    Attributes:
        has_copy_worker: whether vLLM's own offloading copies there by itself.
        kv_cache_bytes: memory for an engine's KV cache.
        batched_tokens: the most tokens that an engine computes in one step.
    """

    has_copy_worker: bool
    kv_cache_bytes: int
    batched_tokens: int


DEVICES = {"cpu": Device(False, 1 << 30, 2048), "cuda": Device(True, 16 << 30, 8192)}


@dataclass(frozen=True)
class EngineKind:
    """Properties common to all engines of a measurement."""

    model: Path
    dtype: str
    max_tokens: int
    max_requests: int = 4
    device: Device = DEVICES["cpu"]

    @classmethod
    def for_prompts(cls, model: Path, dtype: str, lengths: Sequence[int], device: str = "cpu") -> "EngineKind":
        """Returns a kind of engine that takes prompts of these lengths."""
        return cls(model, dtype, max(lengths) + MARGIN_TOKENS, device=DEVICES[device])

    def arguments(self, transfer: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns arguments of ``vllm.LLM``."""
        found: dict[str, Any] = {
            "model": str(self.model),
            "dtype": self.dtype,
            "max_model_len": self.max_tokens,
            "max_num_seqs": self.max_requests,
            "max_num_batched_tokens": self.device.batched_tokens,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": self.device.kv_cache_bytes,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
        }
        return found if transfer is None else {**found, "kv_transfer_config": dict(transfer)}


@dataclass(frozen=True)
class Sent:
    """Answers to the prompts of the steps of one name.

    Attributes:
        ttft_ms: milliseconds to the first token, of each prompt.
        hit_tokens: tokens of each prompt that were found in a cache.
        outputs: tokens of each answer.
        took_s: seconds of each prompt, or of all that were sent together, to the end of the last answer.
    """

    ttft_ms: tuple[float, ...]
    hit_tokens: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]
    took_s: tuple[float, ...] = ()

    @property
    def median_ms(self) -> float:
        """Median time to the first token."""
        return median(self.ttft_ms)


@dataclass(frozen=True)
class Crowd:
    """Steps of an engine with many waiting requests.

    Attributes:
        schedule_ms: milliseconds of the scheduler's part of each step.
        running: requests that ran in each step.
        waiting: requests that waited before each step.
        took_s: seconds of all steps.
        done: number of requests that ended in them.
    """

    schedule_ms: tuple[float, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    took_s: float
    done: int


@dataclass(frozen=True)
class Result:
    """Results of an engine."""

    sent: Mapping[str, Sent]
    load_average: tuple[float, ...]
    crowds: Mapping[str, Crowd] = field(default_factory=dict)


def warm_up(lengths: Sequence[int]) -> Prompts:
    """Returns what an engine computes before it is measured: a prompt no longer than the longest of these."""
    return [(999_999, min(WARM_UP_TOKENS, max(lengths)))]


def pool_bytes_for(size: ModelSize, dtype: str, lengths: Sequence[int], repeats: int) -> int:
    """Returns the bytes of a pool that holds all prompts twice."""
    return 2 * repeats * sum(lengths) * size.kv_bytes_per_token(dtype) + POOL_MARGIN_BYTES


def kvdepot_transfer(home: DepotHome) -> dict[str, Any]:
    """Returns kvdepot's connector, on the depot of ``home``."""
    return {
        "kv_connector": "KVDepotConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvdepot.engines.vllm",
        "kv_connector_extra_config": {"config": str(home.config)},
    }


def native_transfer(memory_bytes: int, directory: Path | None, device: Device) -> dict[str, Any]:
    """Returns vLLM's own connector: host memory, and files below it if there is a directory."""
    extra: dict[str, Any] = {"cpu_bytes_to_use": memory_bytes}
    if device.has_copy_worker:
        extra["spec_name"] = "CPUOffloadingSpec" if directory is None else "TieringOffloadingSpec"
    else:
        extra["spec_module_path"] = "benches.engine.native_offload_shim"
        extra["spec_name"] = "HostCpuSpec" if directory is None else "HostTieringSpec"
    if directory is not None:
        threads = {"n_read_threads": READ_THREADS, "n_write_threads": WRITE_THREADS}
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(directory), **threads}]
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def tier_transfer(memory_bytes: int, home: DepotHome, device: Device) -> dict[str, Any]:
    """The connector that vLLM brings, with host memory, and the depot of ``home`` below it."""
    transfer = native_transfer(memory_bytes, home.root, device)
    tier = {"type": "KVDepotTier", "module_path": "kvdepot.engines.offloading", "config": str(home.config)}
    transfer["kv_connector_extra_config"]["secondary_tiers"] = [tier]
    return transfer


def send(name: str, prompts: Prompts, *, max_tokens: int = 8, together: bool = False) -> Step:
    """Sends prompts, in sequence or all together."""
    return {"do": "send", "name": name, "prompts": list(prompts), "max_tokens": max_tokens, "together": together}


def crowd(name: str, prompts: Prompts, *, max_tokens: int, steps: int) -> Step:
    """Adds all prompts, and times the scheduler in a number of steps."""
    return {"do": "crowd", "name": name, "prompts": list(prompts), "max_tokens": max_tokens, "steps": steps}


def forget() -> Step:
    """Empties vLLM's own prefix cache."""
    return {"do": "forget"}


def settle(home: DepotHome | None = None, directory: Path | None = None) -> Step:
    """Waits until everything is stored."""
    socket = str(home.socket) if home is not None else None
    return {"do": "settle", "socket": socket, "directory": str(directory) if directory is not None else None}


def run_engine(name: str, kind: EngineKind, transfer: Mapping[str, Any] | None, steps: Iterable[Step]) -> Result:
    """Runs an engine through its steps, in a process of its own, forked from one that has imported vLLM.

    Raises:
        ChildError: it failed, or took too long.
    """
    directory = WORK / "bench-engine"
    plan, result = directory / f"{name}.plan.json", directory / f"{name}.result.json"
    directory.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)
    plan.write_text(json.dumps({"engine": kind.arguments(transfer), "result": str(result), "steps": list(steps)}))
    log = directory / f"{name}.log"
    fork = warm().start("benches.engine.engine", str(plan), log, {}, ROOT)
    try:
        status = fork.wait(RUN_S)
    except TimeoutError:
        raise ChildError(f"the engine {name} did not end within {RUN_S:.0f} s\n{tail(log)}") from None
    finally:
        fork.end()
    if status != 0:
        raise ChildError(f"the engine {name} ended with status {status}\n{tail(log)}")
    found = json.loads(result.read_text())
    sent = {
        key: Sent(
            tuple(answer["ttft_ms"] for answer in answers),
            tuple(answer["hit_tokens"] for answer in answers),
            tuple(tuple(answer["output"]) for answer in answers),
            tuple(found["took_s"][key]),
        )
        for key, answers in found["sent"].items()
    }
    crowds = {
        key: Crowd(
            tuple(crowd["schedule_ms"]),
            tuple(crowd["running"]),
            tuple(crowd["waiting"]),
            crowd["took_s"],
            crowd["done"],
        )
        for key, crowd in found.get("crowds", {}).items()
    }
    return Result(sent, tuple(found["load_average"]), crowds)


@cache
def warm() -> Warm:
    """Returns the process that engines are forked from; it ends with this one."""
    started = Warm(WORK / "bench-engine" / "warm.log", environ=ON_ALL_CORES)
    atexit.register(started.close)
    return started


def empty_directory(path: Path) -> Path:
    """Returns the directory, emptied."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
