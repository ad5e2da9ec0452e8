"""Keys of the engine's side: what it dumps and loads, and how long it waits."""

from typing import Literal

from pydantic import BaseModel, field_validator

from kvdepot.config.depot_keys import TIMEOUT_MS_MAX
from kvdepot.config.keys import home, key

KV_HEAD_SLICES_MAX = 1024
"""Larger than the number of KV heads of any model."""


class EngineKeys(BaseModel):
    """What an engine dumps and loads, and how long it waits."""

    use_layerwise: Literal[True, False, "auto"] = key(
        "auto",
        "Load and save layer by layer, in parallel with the computation. `auto`: on CPUs only, because on GPUs a step "
        "that waits for loads would cost vLLM its full CUDA graphs.",
        seeds=["use_layerwise"],
    )
    enable_event_sync: bool = key(
        True,
        "Order copies after the engine's computation by events. `false` waits for the entire device stream instead.",
        seeds=["enable_event_sync"],
    )
    kv_head_slices: int = key(
        0,
        "Number of slices of KV heads in which each block is stored, so that engines with that many or fewer "
        "tensor-parallel ranks share blocks. All of them must set the same number, a multiple of each engine's ranks. "
        "If it is the number of KV heads, engines with even more ranks can share blocks, too. 0 = blocks are shared "
        "only between engines with the same number of ranks.",
        unit="slices",
        ge=0,
        le=KV_HEAD_SLICES_MAX,
    )
    hit_ratio: float | None = key(
        None,
        "Maximum share of a prompt's tokens that is a hit, including vLLM's own hit.",
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
        "How long a request waits for blocks from a tier. `best_effort`: not at all. `deadline`: `load_deadline_ms`. "
        "`all`: `timeout_ms`. `faster`: only as long as computing them would take longer, and at most `timeout_ms`.",
    )
    load_deadline_ms: int | None = key(
        None,
        "How long a request waits with `load_policy: deadline`, which needs this key.",
        unit="ms",
        by_default="none",
        ge=1,
        le=TIMEOUT_MS_MAX,
    )
    copy_threads: int = key(
        0,
        "Threads of an engine that copy on the host. 0 = the number of processors for loads and half of it for dumps, "
        "each at most 4.",
        unit="threads",
        ge=0,
        le=256,
    )
    copy_engine: Literal["auto", "host", "memcpy", "batch", "kernel", "gdr"] = key(
        "auto",
        "Copy engine between the engine's memory and the pool. `auto` takes the one that fits the memory and was "
        "measured as the fastest on the device; `host` is for KV caches in host memory, the others are for CUDA "
        "devices.",
    )
    copy_engines_forbidden: tuple[Literal["batch", "kernel", "gdr"], ...] | None = key(
        None,
        "Copy engines that are never used, not even by `auto`: a workaround if a driver or device handles one "
        "incorrectly. `memcpy` cannot be forbidden, because it is the only one that copies unregistered memory.",
        by_default="none",
        type_text="list of batch, kernel, gdr",
    )
    use_gdr: Literal[True, False, "auto"] = key(
        False,
        "Copy between a CUDA device and the pool through an RDMA adapter (GPUDirect RDMA). If something that it needs "
        "is missing, `true` is an error, and `auto` logs it once. `auto` also leaves an adapter that fails later, "
        "until the engine restarts.",
        seeds=["use_gdr"],
    )
    gdr_nics: tuple[str, ...] | None = key(
        None,
        "RDMA adapters for `use_gdr`, in the order of the CUDA device numbers. It overrides the variable "
        "`DEVICE_GDR_NICS`.",
        by_default="the nearest on the PCI bus",
        type_text="list of names",
    )

    _engine_paths = field_validator("trace_directory", "metrics_config_path", mode="before")(home)

    @field_validator("gdr_nics", "copy_engines_forbidden", mode="before")
    @classmethod
    def _list_of_names(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    use_lite: bool = key(
        False,
        "Count hits without storing anything: no depot is started and no data is copied. The engine's log and metrics "
        "show the hits that pools of several sizes, and an endless one, would have given.",
        seeds=["use_lite"],
    )
    enable_record_traces: bool = key(
        False,
        "Record each finished request for `kvdepot trace replay`: its time, lengths and the chained hashes of the "
        "prompt's blocks.",
        seeds=["enable_record_traces"],
    )
    trace_directory: str | None = key(
        None,
        "Directory of the recorded requests.",
        by_default="`kvdepot/traces` in the user's cache directory",
    )
    trace_file_mb: int = key(
        64,
        "Maximum size of a file of recorded requests; then the next file begins. `UCM_LOG_MAX_SIZE` overrides it.",
        unit="MiB",
        ge=1,
        le=1 << 20,
    )
    trace_files: int = key(
        10,
        "Maximum number of files of recorded requests; the oldest are deleted. `UCM_LOG_MAX_FILES` overrides it.",
        unit="files",
        ge=1,
        le=100_000,
    )
    metrics_config_path: str | None = key(
        None,
        "File with additional series for vLLM's `/metrics`, besides `vllm:kvdepot_…`. It has `metric_prefix`, "
        "`counter`, `gauge` and `histogram` in the format of Unified Cache Management. Names that kvdepot does not "
        "measure are logged.",
        seeds=["metrics_config_path"],
        by_default="none",
    )
