"""Keys of an engine's side: what it dumps and loads, and how long it waits."""

from typing import Literal

from pydantic import BaseModel

from kvdepot.config.depot_keys import TIMEOUT_MS_MAX
from kvdepot.config.keys import key


class EngineKeys(BaseModel):
    """What an engine dumps and loads, and how long it waits."""

    use_layerwise: bool = key(
        True,
        "Load and save layer by layer, beside the computation.",
        seeds=["use_layerwise"],
    )
    enable_event_sync: bool = key(
        True,
        "Order copies after the engine's compute by events; false waits for the whole device stream instead.",
        seeds=["enable_event_sync"],
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
    load_policy: Literal["best_effort", "deadline", "all"] = key(
        "all",
        "How long a request waits for blocks from a tier: not at all, `load_deadline_ms`, or `timeout_ms`.",
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
        "Threads of an engine that copy on the host; 0 = chosen for the machine.",
        unit="threads",
        ge=0,
        le=256,
    )
    copy_engine: Literal["auto", "host", "memcpy", "batch", "kernel"] = key(
        "auto",
        "What copies between the engine's memory and the pool: `auto` takes what fits the memory and was measured to "
        "be quickest on the device; `host` is for KV caches in host memory, the others for CUDA devices.",
    )
    use_gdr: bool = key(
        False,
        "Copy between device and pool by GPUDirect RDMA.",
        seeds=["use_gdr"],
        only=[False],
        instead="write false or remove the key",
    )
    use_lite: bool = key(
        False,
        "Count hits without storing anything.",
        seeds=["use_lite"],
        only=[False],
        instead="write false or remove the key",
    )
    enable_record_traces: bool = key(
        False,
        "Record every request's block hashes.",
        seeds=["enable_record_traces"],
        only=[False],
        instead="write false or remove the key",
    )
    metrics_config_path: str | None = key(
        None,
        "File that says which metrics are exported.",
        seeds=["metrics_config_path"],
        by_default="none",
        only=[None, ""],
        instead="remove the key",
    )
