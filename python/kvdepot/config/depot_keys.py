"""Keys of the depot itself: where it runs, its pool, its queues and deadlines."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator

from kvdepot.config.keys import key
from kvdepot.config.pipeline import normal_pipeline

TIMEOUT_MS_MAX = 3_600_000
QUEUE_DEPTH_MAX = 1 << 24
GIB_MAX = float(1 << 40)


class DepotKeys(BaseModel):
    """Where the depot runs, its pool, its queues and deadlines."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    pipeline: str = key(
        "Cache|Posix",
        "The pool (`Cache` keeps blocks, `Staging` only passes them on) and the tiers under it, nearest first. "
        "`Posix` alone is `Staging|Posix`.",
        seeds=["store_pipeline"],
    )
    mode: Literal["auto", "node", "embedded"] = key(
        "auto",
        "`node`: one depot process a node, shared by its engines. `embedded`: a depot inside this process. "
        "`auto`: `node` for engines, `embedded` for `kvdepot.open`.",
    )
    socket: str | None = key(
        None,
        "Unix socket of the node's depot; an absolute path.",
        by_default="made from the configuration, in the user's runtime directory",
    )
    share_depot: bool = key(
        True,
        "Engines with the same configuration share one depot and its pool; false gives each engine its own.",
        seeds=["share_buffer_enable"],
    )
    start_depot: bool = key(
        True,
        "Whether an engine starts the depot when none answers. `false`: it runs on misses until one does, and only the "
        "depot itself checks the pool's size against its machine. For depots that systemd or a DaemonSet starts.",
    )
    idle_exit_s: int = key(
        600,
        "A depot that an engine has started ends when nobody was attached for so long; 0 = never.",
        unit="s",
        ge=0,
        le=31_536_000,
    )
    drain_timeout_s: int = key(
        30,
        "How long a depot that ends writes blocks that are in no tier yet; those left then are lost, and logged. "
        "`kvdepot serve --drain-timeout` overrides it.",
        unit="s",
        ge=0,
        le=86_400,
    )
    pool_keep_s: int = key(
        0,
        "How long a small process keeps the pool's memory when its depot crashes: the next depot takes over every "
        "block that its checksum proves. Under systemd its descriptor store keeps it, where the unit has one. "
        "0 = the memory goes with the depot.",
        unit="s",
        ge=0,
        le=86_400,
    )
    evicted_blocks_remembered: int = key(
        262_144,
        "Blocks that were evicted, lost or refused of which the depot remembers why, so that `kvdepot why` and "
        "`kvdepot_miss_requests_total` can tell a block that went from one that was never stored: 16 bytes each. "
        "0 = none.",
        unit="blocks",
        ge=0,
        le=67_108_864,
    )
    attach_timeout_ms: int = key(
        10_000,
        "How long an engine waits at its start for the depot that it starts; after that it goes on without and "
        "attaches later. With `start_depot: false` it waits in the background, and logs after this long that there is "
        "none.",
        unit="ms",
        ge=0,
        le=TIMEOUT_MS_MAX,
    )
    call_timeout_ms: int = key(
        8,
        "Bound of every call that an engine's thread waits for (lookup, claim), for each 4096 hashes of a claim. "
        "A lookup waits longer for tiers of a depot that answers other calls.",
        unit="ms",
        ge=1,
        le=60_000,
    )
    timeout_ms: int = key(
        30_000,
        "Bound of every dump, load and tier operation; what has not come by then is a miss. Each engine has its own "
        "for its dumps and loads; in the tiers that of the engine that has started the depot holds.",
        unit="ms",
        seeds=["timeout_ms"],
        ge=1,
        le=TIMEOUT_MS_MAX,
    )
    pool_gb: float | None = key(
        None,
        "Host memory of the pool. More than the machine has is an error.",
        unit="GiB",
        seeds=["cache_buffer_capacity_gb"],
        by_default="256, or half of the machine's memory when that is less",
        gt=0,
        le=GIB_MAX,
    )
    pool_slots: int | None = key(
        None,
        "Blocks that a `Staging` pool has room for, instead of `pool_gb`.",
        unit="blocks",
        seeds=["buffer_number"],
        by_default="4096 in a `Staging` pipeline, or what fits half of the machine's memory when that is less",
        ge=1,
        le=1 << 24,
    )
    pool_mlock: bool = key(
        False,
        "Lock the pool's memory, so that it is never swapped out. An error where the limit on locked memory "
        "(`ulimit -l`) is lower than the pool.",
    )
    pool_numa: str = key(
        "auto",
        "NUMA nodes of the pool's memory: `auto` (a region on each node that has processors, where blocks lie "
        "near the GPU that dumps or loads them; the kernel's choice where it refuses), a list such as `0,2-3` "
        "(the same on these nodes, or an error), or `interleave` (one region, for which the nodes give pages "
        "in turn, or an error). Nothing to choose on a machine of one node.",
        max_length=256,
    )
    pool_populate_threads: int = key(
        0,
        "Threads that touch the pool's memory at the start; 0 = half of the processors, 8 at most.",
        unit="threads",
        ge=0,
        le=64,
    )
    eviction: Literal["s3fifo", "lru"] = key("s3fifo", "Which clean blocks leave a full pool first.")
    waiting_queue_depth: int = key(
        8192,
        "Tasks of an engine that may wait; one more is refused at once.",
        unit="tasks",
        seeds=["waiting_queue_depth"],
        ge=1,
        le=QUEUE_DEPTH_MAX,
    )
    running_queue_depth: int = key(
        524_288,
        "Shards of blocks that a task of an engine may have under way at a time.",
        unit="blocks",
        seeds=["running_queue_depth"],
        ge=1,
        le=QUEUE_DEPTH_MAX,
    )
    metrics_port: int | None = key(
        None,
        "Port of 127.0.0.1 where the depot answers `/metrics`, `/health` and `/status`. Depots of one machine need "
        "different ones; who comes second says so in its log and serves without. The Unix socket `SOCKET.http` answers "
        "the same with or without it.",
        unit="port",
        by_default="none",
        ge=0,
        le=65_535,
    )
    log_level: Literal["error", "warn", "info", "debug", "trace"] = key(
        "info",
        "How much is logged. The environment's `KVDEPOT_LOG`, then `UC_LOGGER_LEVEL`, go before it.",
    )
    log_format: Literal["text", "json"] = key(
        "text",
        "How the core's log lines are written; `json`: an object a line, with `time`, `level`, `message`, `fields`, "
        "`left_out`, `pid` and `tid`.",
    )
    log_max_size_mb: int = key(
        10,
        "Size of a depot's log file; then the next one begins, and this one is called `….log.1`. 0 = no bound. The "
        "environment's `UCM_LOG_MAX_SIZE` goes before it.",
        unit="MiB",
        ge=0,
        le=1 << 40,
    )
    log_max_files: int = key(
        10,
        "Log files that a depot keeps, the one that it writes included. The environment's `UCM_LOG_MAX_FILES` goes "
        "before it.",
        unit="files",
        ge=1,
        le=1000,
    )
    log_burst_lines: int = key(
        20,
        "Lines of one kind that are written in ten seconds; the next one after that says how many were left out. Does "
        "not hold for `debug` and `trace`. 0 = no bound.",
        unit="lines",
        ge=0,
        le=1 << 20,
    )

    @field_validator("pipeline")
    @classmethod
    def _normal_pipeline(cls, value: str) -> str:
        return normal_pipeline(value)
