"""Keys of the depot itself: where it runs, its pool, its queues and deadlines."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator

from kvdepot.config.keys import home, key
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
        "`node`: one depot process per node, shared by its engines. `embedded`: a depot inside this process. `auto`: "
        "`node` for engines, `embedded` for `kvdepot.open`.",
    )
    socket: str | None = key(
        None,
        "Unix socket of the node's depot, as an absolute path.",
        by_default="made from the configuration, in the user's runtime directory",
    )
    share_depot: bool = key(
        True,
        "Engines with the same configuration share one depot and its pool. `false` gives each engine its own.",
        seeds=["share_buffer_enable"],
    )
    start_depot: bool = key(
        True,
        "Whether an engine starts the depot if none answers. With `false` every request is a miss until one does, and "
        "only the depot itself checks the pool's size against its machine. Set it to `false` for depots that systemd "
        "or a DaemonSet starts.",
    )
    idle_exit_s: int = key(
        600,
        "Idle time after which a depot that an engine started exits: the time without any attached client. 0 = never.",
        unit="s",
        ge=0,
        le=31_536_000,
    )
    drain_timeout_s: int = key(
        30,
        "Time limit for writing blocks that are in no tier yet when a depot shuts down. Blocks that are left then are "
        "lost, and logged. `kvdepot serve --drain-timeout` overrides it.",
        unit="s",
        ge=0,
        le=86_400,
    )
    pool_keep_s: int = key(
        0,
        "How long a small process keeps the pool's memory after its depot crashed. The next depot takes over every "
        "block whose checksum is correct. Under systemd the descriptor store of the unit keeps the memory instead, if "
        "it has one. 0 = the memory is freed with the depot.",
        unit="s",
        ge=0,
        le=86_400,
    )
    evicted_blocks_remembered: int = key(
        262_144,
        "How many evicted, lost or refused blocks the depot remembers, with the reason (16 bytes each). `kvdepot why` "
        "and `kvdepot_miss_requests_total` use this history to tell such a block from one that was never stored. "
        "0 = none.",
        unit="blocks",
        ge=0,
        le=67_108_864,
    )
    attach_timeout_ms: int = key(
        10_000,
        "How long a starting engine waits for the depot that it starts. After that it continues without a depot and "
        "attaches later. With `start_depot: false` it waits in the background, and logs after this time that there is "
        "no depot.",
        unit="ms",
        ge=0,
        le=TIMEOUT_MS_MAX,
    )
    call_timeout_ms: int = key(
        8,
        "Time limit of every call that an engine's thread waits for (lookup, claim), for each 4096 hashes of a claim. "
        "A lookup waits longer for slow tiers if the depot still answers other calls.",
        unit="ms",
        ge=1,
        le=60_000,
    )
    timeout_ms: int = key(
        30_000,
        "Time limit of every dump, load and tier operation. Blocks that have not arrived by then are misses. Each "
        "engine uses its own value for its dumps and loads; tiers use the value of the engine that started the depot.",
        unit="ms",
        seeds=["timeout_ms"],
        ge=1,
        le=TIMEOUT_MS_MAX,
    )
    pool_gb: float | None = key(
        None,
        "Host memory of the pool. It is an error to set more than the machine has.",
        unit="GiB",
        seeds=["cache_buffer_capacity_gb"],
        by_default="256, or half of the machine's memory when that is less",
        gt=0,
        le=GIB_MAX,
    )
    pool_slots: int | None = key(
        None,
        "Size of a `Staging` pool in blocks, instead of `pool_gb`.",
        unit="blocks",
        seeds=["buffer_number"],
        by_default="4096 in a `Staging` pipeline, or what fits half of the machine's memory when that is less",
        ge=1,
        le=1 << 24,
    )
    pool_mlock: bool = key(
        False,
        "Lock the pool's memory, so that it is never swapped out. It is an error if the limit on locked memory "
        "(`ulimit -l`) is lower than the pool.",
    )
    pool_numa: str = key(
        "auto",
        "NUMA nodes of the pool's memory. `auto`: a region on each node that has processors, with blocks near the GPU "
        "that dumps or loads them; if the kernel refuses that, it chooses. A list such as `0,2-3`: the same on these "
        "nodes, or an error. `interleave`: one region whose pages come from the nodes in turn, or an error. It has no "
        "effect on a machine with one node.",
        max_length=256,
    )
    pool_populate_threads: int = key(
        0,
        "Threads that touch the pool's memory when the depot starts. 0 = half of the processors, 8 at most.",
        unit="threads",
        ge=0,
        le=64,
    )
    eviction: Literal["lhd", "s3fifo", "lru"] = key(
        "lhd",
        "Eviction policy: which clean blocks a full pool evicts first. `lhd`: the least likely to be used soon, as "
        "learned from other blocks by uses and age. `s3fifo`: new ones that are not used again soon. `lru`: the least "
        "recently used.",
    )
    waiting_queue_depth: int = key(
        8192,
        "Maximum number of tasks that wait in each of an engine's two queues (loads, dumps). A task beyond it is "
        "refused immediately.",
        unit="tasks",
        seeds=["waiting_queue_depth"],
        ge=1,
        le=QUEUE_DEPTH_MAX,
    )
    running_queue_depth: int = key(
        524_288,
        "Maximum number of shards of blocks that one task of an engine has in flight.",
        unit="shards",
        seeds=["running_queue_depth"],
        ge=1,
        le=QUEUE_DEPTH_MAX,
    )
    metrics_port: int | None = key(
        None,
        "Port of `metrics_host` where the depot serves the status page, `/metrics`, `/health`, `/status`, `/history`, "
        "`/config` and `/errors`. Depots on one machine need "
        "different ports: a depot whose port is taken logs that and runs without. The Unix socket `SOCKET.http` serves "
        "the same pages in any case, and `/misses`, `/namespaces` and `/why`.",
        unit="port",
        by_default="none",
        ge=0,
        le=65_535,
    )
    metrics_host: str = key(
        "127.0.0.1",
        "IP address of `metrics_port`: `0.0.0.0` is all IPv4 addresses of the machine, `::` all addresses. At another "
        "address than the loopback, set `metrics_token_file`, too.",
    )
    metrics_token_file: str | None = key(
        None,
        "File with the secret for `metrics_port`. If it is set, `/config`, `/errors`, `/history`, `/misses`, "
        "`/namespaces`, `/status`, `/why` and the series of single namespaces need it (`Authorization: Bearer …`); "
        "`/metrics` and `/health` do not. It is sent without TLS, so never use the secret of pool servers.",
        by_default="no secret",
    )
    log_level: Literal["error", "warn", "info", "debug", "trace"] = key(
        "info",
        "Lowest level that is logged. The environment variables `KVDEPOT_LOG` and then `UC_LOGGER_LEVEL` override it.",
    )
    log_format: Literal["text", "json"] = key(
        "text",
        "Format of the core's log lines. `json`: one object per line, with `time`, `level`, `message`, `fields`, "
        "`left_out`, `pid` and `tid`.",
    )
    log_max_size_mb: int = key(
        10,
        "Maximum size of a depot's log file. A full file is renamed to `….log.1`, and a new one begins. 0 = no limit. "
        "The environment variable `UCM_LOG_MAX_SIZE` overrides it.",
        unit="MiB",
        ge=0,
        le=1 << 40,
    )
    log_max_files: int = key(
        10,
        "Maximum number of log files that a depot keeps, including the current one. The environment variable "
        "`UCM_LOG_MAX_FILES` overrides it.",
        unit="files",
        ge=1,
        le=1000,
    )
    log_burst_lines: int = key(
        20,
        "Maximum number of lines of one kind in ten seconds. The next line of that kind reports how many were dropped. "
        "It does not apply to `debug` and `trace`. 0 = no limit.",
        unit="lines",
        ge=0,
        le=1 << 20,
    )

    _depot_paths = field_validator("socket", "metrics_token_file", mode="before")(home)

    @field_validator("pipeline")
    @classmethod
    def _normal_pipeline(cls, value: str) -> str:
        return normal_pipeline(value)
