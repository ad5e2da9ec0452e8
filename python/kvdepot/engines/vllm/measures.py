"""The connector's metrics: names, units, and how ranks' values are combined into the engine's."""

from dataclasses import dataclass
from enum import Enum

from kvdepot.engines.vllm.lookup import MISSES


class Kind(Enum):
    """How a measure is combined over time."""

    COUNTER = "sum"
    HISTOGRAM = "observations"
    GAUGE = "latest"


class Over(Enum):
    """How a measure is combined over an engine's processes."""

    SCHEDULER = "only the scheduler has it"
    SUM = "every rank moves its own bytes, or fails on its own: the ranks' sum"
    FIRST = "every rank does the same: the first rank's"
    SHARED = "ranks that hold the same bytes share the work: the sum over those that hold the first slice"


SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class Measure:
    """One metric.

    Attributes:
        name: name of the series after ``vllm:kvdepot_``; ends in its unit.
        text: description for operators.
        label: name of the label; empty = none.
        values: values of the label that exist from the start.
        buckets: upper bounds of a histogram's buckets.
    """

    name: str
    over: Over
    text: str
    kind: Kind = Kind.COUNTER
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = SECONDS_BUCKETS


LITE_SIZES = {"quarter": 0.25, "half": 0.5, "pool": 1.0, "double": 2.0, "fourfold": 4.0}
"""Depot sizes that `use_lite` counts for, relative to the configured pool."""

BLOCKS_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
RATE_BUCKETS = (1e7, 1e8, 5e8, 1e9, 2e9, 5e9, 1e10, 2e10, 3e10, 5e10, 1e11)
RATIO_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

_ALL = (
    Measure("claims", Over.SCHEDULER, "Lookups for requests, each of which may lease blocks."),
    Measure(
        "asked_tokens",
        Over.SCHEDULER,
        "Tokens requested by lookups, beyond vLLM's own hits. A waiting request may look up more than once.",
    ),
    Measure(
        "hit_tokens",
        Over.SCHEDULER,
        "Tokens that requests were given at admission, by source: the pool, or a tier. Loads that fail stay counted.",
        label="source",
        values=("pool", "tier"),
    ),
    Measure(
        "tier_blocks",
        Over.SCHEDULER,
        "Blocks that tiers delivered for requests' hits, by tier, over all ranks and cache groups.",
        label="tier",
    ),
    Measure(
        "declined_tokens",
        Over.SCHEDULER,
        "Tokens that a tier had but that were computed, because waiting for them would have taken longer.",
    ),
    Measure(
        "shared_load_tokens",
        Over.SCHEDULER,
        "Tokens that requests did not load, because they waited for another request's load of the same prefix.",
    ),
    Measure(
        "lookup_seconds",
        Over.SCHEDULER,
        "Time from a request's lookup until its hit was known, including waits for tiers.",
        Kind.HISTOGRAM,
    ),
    Measure(
        "lookup_hit_ratio",
        Over.SCHEDULER,
        "Share of a lookup's requested tokens that were a hit.",
        Kind.HISTOGRAM,
        buckets=RATIO_BUCKETS,
    ),
    Measure(
        "loads", Over.FIRST, "Loads, one per KV-cache group: of a request, or of all requests that a step waits for."
    ),
    Measure("load_blocks", Over.FIRST, "Blocks copied from the depot into the KV cache of one rank."),
    Measure("load_bytes", Over.SUM, "Bytes copied from the depot into the KV cache, over all ranks."),
    Measure(
        "load_seconds",
        Over.FIRST,
        "Time from a load's start until the engine noticed its completion at the end of a step.",
        Kind.HISTOGRAM,
    ),
    Measure(
        "load_size_blocks",
        Over.FIRST,
        "Blocks that a load copied into the KV cache of one rank.",
        Kind.HISTOGRAM,
        buckets=BLOCKS_BUCKETS,
    ),
    Measure(
        "load_bytes_per_second",
        Over.SUM,
        "Bytes that a load copied into one rank's KV cache, divided by its `load_seconds`.",
        Kind.HISTOGRAM,
        buckets=RATE_BUCKETS,
    ),
    Measure(
        "load_failed_blocks",
        Over.SUM,
        "Blocks that could not be loaded and are computed instead, over all ranks and their slices of KV heads.",
        label="kind",
    ),
    Measure(
        "dump_blocks",
        Over.SHARED,
        "Blocks copied into the depot from the KV cache of one rank, or of ranks that hold the same and share them.",
    ),
    Measure("dump_bytes", Over.SUM, "Bytes copied from the KV cache into the depot, over all ranks."),
    Measure(
        "dump_seconds",
        Over.FIRST,
        "Time from a dump's start until the engine noticed its completion, which may be a step or more later.",
        Kind.HISTOGRAM,
    ),
    Measure(
        "dump_size_blocks",
        Over.FIRST,
        "Blocks that a dump copied out of the KV cache of one rank.",
        Kind.HISTOGRAM,
        buckets=BLOCKS_BUCKETS,
    ),
    Measure(
        "dump_bytes_per_second",
        Over.SUM,
        "Bytes that a dump copied out of one rank's KV cache, divided by its `dump_seconds`.",
        Kind.HISTOGRAM,
        buckets=RATE_BUCKETS,
    ),
    Measure(
        "dump_failed_blocks",
        Over.SUM,
        "Blocks that a rank could not store, over all ranks and their slices.",
        label="kind",
    ),
    Measure(
        "dropped_blocks",
        Over.SCHEDULER,
        "Computed blocks that were not handed to the ranks to be stored: computed from a load that failed, "
        "overwritten before that was known, computed with a LoRA adapter that was replaced meanwhile, or left when the "
        "connector was disabled or reset.",
        label="reason",
        values=("load_failed", "overwritten", "adapter", "turned_off"),
    ),
    Measure(
        "dump_fences", Over.FIRST, "Steps that waited for a dump because they would have overwritten what it read."
    ),
    Measure(
        "misses",
        Over.SCHEDULER,
        "Requests that were given nothing at their first admission, or whose load failed, by reason.",
        label="reason",
        values=tuple(MISSES),
    ),
    Measure("params_unknown", Over.SCHEDULER, "Keys of requests' kv_transfer_params that kvdepot does not know."),
    Measure("params_malformed", Over.SCHEDULER, "Values of requests' kv_transfer_params that cannot be read."),
    Measure(
        "traced_requests",
        Over.SCHEDULER,
        "Requests that finished with `enable_record_traces`: written to a file, dropped because too many waited, or "
        "failed because of a disk error.",
        label="outcome",
        values=("written", "dropped", "failed"),
    ),
    Measure("lite_asked_tokens", Over.SCHEDULER, "With `use_lite`: tokens that lookups would have requested."),
    Measure(
        "lite_hit_tokens",
        Over.SCHEDULER,
        "With `use_lite`: tokens that a depot would have had, by its size relative to the configured pool.",
        label="size",
        values=tuple(LITE_SIZES),
    ),
    Measure("lite_ceiling_tokens", Over.SCHEDULER, "With `use_lite`: tokens that an endless depot would have had."),
    Measure(
        "lite_dropped_calls",
        Over.SCHEDULER,
        "With `use_lite`: lookups and stores that were not counted because the queue was full.",
    ),
    Measure("attached", Over.SCHEDULER, "Whether the engine is attached to a depot (1) or not (0).", Kind.GAUGE),
)
MEASURES = {measure.name: measure for measure in _ALL}
"""All measures by name."""
