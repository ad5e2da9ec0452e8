"""Keys of the engine's side: what it dumps and loads, and how long it waits."""

from typing import Literal

from pydantic import BaseModel, field_validator

from kvdepot.config.depot_keys import TIMEOUT_MS_MAX
from kvdepot.config.keys import key

KV_HEAD_SLICES_MAX = 1024
"""Larger than the number of KV heads of any model."""


class EngineKeys(BaseModel):
    """What an engine dumps and loads, and how long it waits."""

    use_layerwise: Literal[True, False, "auto"] = key(
        "auto",
        "Load and save layer by layer, beside the computation. `auto`: on CPUs only; on GPUs a step that waits for "
        "loads would cost vLLM its full CUDA graphs.",
        seeds=["use_layerwise"],
    )
    enable_event_sync: bool = key(
        True,
        "Order copies after the engine's compute by events; false waits for the whole device stream instead.",
        seeds=["enable_event_sync"],
    )
    kv_head_slices: int = key(
        0,
        "Store each block in so many slices of its KV heads, so that engines with that many or fewer tensor-parallel "
        "ranks share blocks. All of them say the same number, a multiple of each one's ranks; with the number of KV "
        "heads engines with even more ranks take part, too. 0: blocks belong to a number of ranks.",
        unit="slices",
        ge=0,
        le=KV_HEAD_SLICES_MAX,
    )
    hit_ratio: float | None = key(
        None,
        "At most this part of a prompt's tokens is taken from the depot.",
        by_default="no limit",
        seeds=["hit_ratio"],
        ge=0,
        le=1,
    )
    persist_token_threshold: int = key(
        0,
        "Requests with fewer prompt tokens neither load nor dump.",
        unit="tokens",
        seeds=["persist_token_threshold"],
        ge=0,
        le=1 << 31,
    )
    load_policy: Literal["best_effort", "deadline", "all", "faster"] = key(
        "faster",
        "How long a request waits for blocks from a tier: not at all, `load_deadline_ms`, `timeout_ms`, or as long as "
        "computing them would take longer, and `timeout_ms` at most.",
    )
    load_deadline_ms: int | None = key(
        None,
        "The wait of `load_policy: deadline`, which needs it.",
        unit="ms",
        by_default="none",
        ge=1,
        le=TIMEOUT_MS_MAX,
    )
    copy_threads: int = key(
        0,
        "Threads of an engine that copy on the host; 0 = as many as the machine has, 4 at most, for loads, and half of "
        "them for dumps.",
        unit="threads",
        ge=0,
        le=256,
    )
    copy_engine: Literal["auto", "host", "memcpy", "batch", "kernel", "gdr"] = key(
        "auto",
        "What copies between the engine's memory and the pool: `auto` takes what fits the memory and was measured to "
        "be quickest on the device; `host` is for KV caches in host memory, the others for CUDA devices.",
    )
    copy_engines_forbidden: tuple[Literal["batch", "kernel", "gdr"], ...] | None = key(
        None,
        "Copy engines that are not used, also where `auto` would take them: a way around one that a driver or device "
        "gets wrong. `memcpy` cannot be forbidden, because memory that is not registered goes no other way.",
        by_default="none",
        type_text="list of batch, kernel, gdr",
    )
    use_gdr: Literal[True, False, "auto"] = key(
        False,
        "Copy between a CUDA device and the pool by an RDMA adapter (GPUDirect RDMA). With `true`, what is missing for "
        "it is an error; with `auto` it is said once.",
        seeds=["use_gdr"],
    )
    gdr_nics: tuple[str, ...] | None = key(
        None,
        "RDMA adapters for `use_gdr` by the number of the CUDA device; goes before the variable `DEVICE_GDR_NICS`.",
        by_default="the nearest on the PCI bus",
        type_text="list of names",
    )

    @field_validator("gdr_nics", "copy_engines_forbidden", mode="before")
    @classmethod
    def _list_of_names(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    use_lite: bool = key(
        False,
        "Count what a depot would hit, and store nothing: no depot is started and no byte is moved. The engine's log "
        "and metrics say what pools of several sizes, and an endless one, would have given.",
        seeds=["use_lite"],
    )
    enable_record_traces: bool = key(
        False,
        "Record each request when it ends: time, lengths, and the chained hashes of the prompt's blocks, as "
        "`kvdepot trace replay` reads them.",
        seeds=["enable_record_traces"],
    )
    trace_directory: str | None = key(
        None,
        "Where recorded requests go.",
        by_default="`kvdepot/traces` in the user's cache directory",
    )
    trace_file_mb: int = key(
        64,
        "A file of recorded requests that is so large is followed by another. `UCM_LOG_MAX_SIZE` goes before it.",
        unit="MiB",
        ge=1,
        le=1 << 20,
    )
    trace_files: int = key(
        10,
        "Files of recorded requests that the directory keeps, the newest ones. `UCM_LOG_MAX_FILES` goes before it.",
        unit="files",
        ge=1,
        le=100_000,
    )
    metrics_config_path: str | None = key(
        None,
        "File that names series which vLLM's `/metrics` has beside `vllm:kvdepot_…`, with `metric_prefix`, `counter`, "
        "`gauge` and `histogram`, as Unified Cache Management reads it. What it names and kvdepot does not measure is "
        "logged.",
        seeds=["metrics_config_path"],
        by_default="none",
    )
