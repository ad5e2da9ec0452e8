"""Lite mode (``use_lite``): estimates the hits of depots of several sizes for an engine that uses none.

The scheduler's side makes the same lookups and stores as the real one, but in a ``Meter``, which simulates the depots
by block hashes on its own thread. Nothing is attached, started, loaded or stored, and vLLM's own cache works as without
a connector.
"""

# ruff: noqa: ARG002 - hooks that have nothing to do

import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from kvdepot.config import KVDepotConfig
from kvdepot.engines.vllm.attachment import bytes_per_block
from kvdepot.engines.vllm.groups import Geometry
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.lookup import HitLimits, Miss
from kvdepot.engines.vllm.measures import LITE_SIZES
from kvdepot.engines.vllm.meta import LoadReport, StepMetadata
from kvdepot.engines.vllm.options import ConnectorOptions
from kvdepot.engines.vllm.stats import DepotStats
from kvdepot.errors import is_failure
from kvdepot.traces.advice import GIB, Measured, Size, advise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = connector_logger()

SAY_S = 300.0
"""Seconds between reports in the log, while there are requests."""
COUNT_S = 1.0
"""Seconds between updates of the metrics, while requests run."""
LAST_COUNT_MS = 2000
SIMULATED_BLOCKS_MAX = 1 << 20
"""A simulated depot takes about 60 bytes per block. Larger sizes are counted as this size."""


class Meter(Protocol):
    """Interface of the simulation: ``kvdepot.traces.live.Meter``."""

    def look_up(self, block_hashes: "Sequence[bytes]") -> bool:
        """Counts a request for these blocks."""

    def store(self, block_hashes: "Sequence[bytes]") -> bool:
        """Counts that the engine has computed these blocks."""

    def settle(self, wait_ms: int) -> bool:
        """Waits until everything queued is counted. Returns false on timeout."""

    def report_json(self) -> str:
        """Returns the counts as JSON."""


_Args = ParamSpec("_Args")
_Given = TypeVar("_Given")


def _or_off(
    otherwise: Callable[[], _Given],
) -> Callable[
    [Callable[Concatenate["LiteScheduler", _Args], _Given]], Callable[Concatenate["LiteScheduler", _Args], _Given]
]:
    """Makes a hook that never raises: any failure ends the counting, with one log line, but not the engine."""

    def guarded(
        hook: Callable[Concatenate["LiteScheduler", _Args], _Given],
    ) -> Callable[Concatenate["LiteScheduler", _Args], _Given]:
        @functools.wraps(hook)
        def run(side: "LiteScheduler", /, *args: _Args.args, **kwargs: _Args.kwargs) -> _Given:
            try:
                return hook(side, *args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - a panic is one, too
                side.switch_off(error)
                return otherwise()

        return run

    return guarded


def _nothing() -> None:
    """Result of most hooks."""


@dataclass
class Followed:
    """A running request, and how many of its units are stored."""

    request: "Request"
    local_tokens: int = 0
    stored: int = 0
    asked: bool = False


class LiteScheduler:
    """The scheduler's side, with the hooks of ``SchedulerSide``. Calls come from one thread."""

    def __init__(
        self,
        options: ConnectorOptions,
        geometry: Geometry,
        unit_bytes: float,
        *,
        meter: Callable[[str, list[int]], Meter] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = DepotStats()
        self.kv_cache_manager: Any = None
        self.loads_before_forward = options.loads_in_steps and geometry.recomputes_by_block
        self._off = geometry.unsupported
        self._geometry = geometry
        self._threshold = options.persist_token_threshold
        self._limits = HitLimits(geometry, self.loads_before_forward or geometry.windowed, options.hit_ratio)
        self._clock = clock
        self._unit_bytes = unit_bytes
        self._requests: dict[str, Followed] = {}
        self._prompt_tokens = self._own_tokens = self._prompts_said = 0
        self._said_s = self._counted_s = clock()
        self._told: dict[str, int] = {}
        if self._off:
            logger.warning("kvdepot: use_lite counts nothing: %s", self._off)
            return
        pool_units = _pool_bytes(options.config, int(unit_bytes)) / unit_bytes
        sizes = [min(SIMULATED_BLOCKS_MAX, max(1, int(part * pool_units))) for part in LITE_SIZES.values()]
        if meter is None:
            from kvdepot.traces import live

            meter = live.Meter
        self._meter = meter(options.config.eviction, sizes)
        logger.info("kvdepot: use_lite: hits are counted, nothing is stored or loaded")

    # Hooks that ask and store.

    def new_request(self, request: "Request") -> None:
        """``on_new_request``."""

    @_or_off(lambda: (0, False))
    def match(self, request: "Request", local_tokens: int) -> tuple[int, bool]:
        """``get_num_new_matched_tokens``: notes the tokens that vLLM already has; never returns a hit."""
        if not self._off:
            state = self._requests.setdefault(request.request_id, Followed(request))
            state.local_tokens = local_tokens
        return 0, False

    @_or_off(_nothing)
    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """``update_state_after_alloc``: counts the lookup that an admitted request would have made."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        state.stored = state.local_tokens // self._geometry.hit_tokens
        if state.asked:
            return  # after preemption, its earlier blocks are in vLLM's cache or in the depot
        state.asked = True
        self._prompt_tokens += request.num_prompt_tokens
        self._own_tokens += min(state.local_tokens, request.num_prompt_tokens)
        if request.num_prompt_tokens < self._threshold:
            return
        bounds = self._limits.bounds(request, state.local_tokens, None)
        if not isinstance(bounds, Miss):
            unit = self._geometry.hash_tokens
            self._meter.look_up(self._units(request, bounds.skip * unit, bounds.limit * unit))

    @_or_off(StepMetadata)
    def build_step(self, output: "SchedulerOutput") -> StepMetadata:
        """``build_connector_meta``: counts the blocks that the step computes as stored."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        unit = self._geometry.hit_tokens
        for request_id, new_tokens in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None or state.request.num_prompt_tokens < self._threshold:
                continue
            known = len(state.request.block_hashes) * self._geometry.hash_tokens
            end = min(computed[request_id] + new_tokens, known) // unit
            if end > state.stored:
                self._meter.store(self._units(state.request, state.stored * unit, end * unit))
                state.stored = end
        now_s = self._clock()
        if now_s - self._said_s >= SAY_S:
            self.say()
        if now_s - self._counted_s >= COUNT_S:
            self._count()
        return StepMetadata()

    @_or_off(_nothing)
    def finished(self, request_id: str) -> None:
        """``request_finished``."""
        if self._requests.pop(request_id, None) is not None:
            self._count()

    def _units(self, request: "Request", begin_tokens: int, end_tokens: int) -> "list[bytes]":
        """Returns the hash of each unit that a hit consists of: the last of the hashes that it covers."""
        per = self._geometry.hit_tokens // self._geometry.hash_tokens
        unit = self._geometry.hash_tokens
        return list(request.block_hashes[begin_tokens // unit + per - 1 : end_tokens // unit : per])

    def switch_off(self, error: BaseException) -> None:
        """Stops counting after a failure; re-raises what is not a failure."""
        if not is_failure(error):
            raise error
        if self._off:
            return
        self._off = str(error) or type(error).__name__
        self._requests.clear()
        self.stats.add("lite_dropped_calls")
        logger.error("kvdepot: use_lite counts nothing from now on: %s", self._off, exc_info=error)

    # What was counted.

    def measured(self) -> Measured:
        """Returns the counts so far."""
        report = json.loads(self._meter.report_json())
        tokens = self._geometry.hit_tokens
        sizes = [
            Size(size["capacity"] * self._unit_bytes, size["hits"] * tokens, size["held"] >= size["capacity"])
            for size in report["sizes"]
        ]
        return Measured(self._prompt_tokens, self._own_tokens, report["ceiling"] * tokens, sizes)

    def say(self) -> None:
        """Logs the counts, if there was a request since the last time."""
        self._said_s = self._clock()
        if self._off or self._prompt_tokens == self._prompts_said:
            return
        self._prompts_said = self._prompt_tokens
        for line in advise(self.measured()):
            logger.info("kvdepot lite: %s", line)

    def _count(self) -> None:
        self._counted_s = self._clock()
        if self._off:
            return
        report, tokens = json.loads(self._meter.report_json()), self._geometry.hit_tokens
        self._add("lite_asked_tokens", report["asked"] * tokens)
        self._add("lite_ceiling_tokens", report["ceiling"] * tokens)
        self._add("lite_dropped_calls", report["dropped"])
        for name, size in zip(LITE_SIZES, report["sizes"], strict=True):
            self._add("lite_hit_tokens", size["hits"] * tokens, name)

    def _add(self, name: str, now: int, label: str = "") -> None:
        """Raises a counter to ``now``. A counter never falls, but the sketch's estimate may, slightly."""
        key = f"{name}/{label}"
        before = self._told.get(key, 0)
        if now > before:
            self.stats.add(name, now - before, label)
            self._told[key] = now

    # Hooks without work.

    def hit_tier_tokens(self, request: "Request") -> int:
        """Returns 0: nothing is hit."""
        return 0

    def reported(self, report: LoadReport | None, *, invalid_pages: bool = False) -> None:
        """Does nothing: no rank reports anything."""

    def has_late_saves(self) -> bool:
        """Returns false: nothing is saved."""
        return False

    def reset(self) -> bool:
        """Returns true. The simulated depots keep their content, as real ones do by default."""
        return True

    @_or_off(_nothing)
    def close(self) -> None:
        """Logs the final counts."""
        if not self._off:
            self._meter.settle(LAST_COUNT_MS)
            self.say()


class LiteWorker:
    """The worker's side, which moves nothing."""

    def __init__(self) -> None:
        self.stats = DepotStats()

    def register(self, *_: object, sleep_hooks: bool = False) -> None:
        """``register_kv_caches``."""

    def sleep(self) -> None:
        """``unregister_kv_caches``."""

    def wake_up(self) -> None:
        """``restore_kv_caches``."""

    def prepare(self, step: StepMetadata) -> None:
        """``handle_preemptions``."""

    def start_loads(self, step: StepMetadata) -> None:
        """``start_load_kv``."""

    def wait_for_layer(self, layer_name: str) -> None:
        """``wait_for_layer_load``."""

    def save_layer(self, layer_name: str, step: StepMetadata) -> None:
        """``save_kv_layer``."""

    def finish_saves(self, step: StepMetadata) -> None:
        """``wait_for_save``."""

    def finished_loads(self) -> set[str]:
        """``get_finished``."""
        return set()

    def failed_loads(self) -> set[str]:
        """``get_transfer_results``."""
        return set()

    def failed_pages(self) -> set[int]:
        """``get_block_ids_with_load_errors``."""
        return set()

    def report(self) -> None:
        """``build_connector_worker_meta``."""

    def close(self) -> None:
        """``shutdown``."""


def _pool_bytes(config: KVDepotConfig, block_bytes: int) -> float:
    """Returns the bytes of the configured pool, even if this machine does not have the memory for it."""
    return config.pool_gb * GIB if config.pool_gb is not None else config.pool_bytes(max(1, block_bytes))


def unit_bytes(geometry: Geometry, kv_cache_config: "KVCacheConfig", ranks: int) -> float:
    """Returns the bytes that a depot stores for ``hit_tokens`` tokens, over all groups and ranks.

    Ranks that hold the same bytes (latent attention) count once.
    """
    if geometry.unsupported:
        return 1.0
    block = bytes_per_block(kv_cache_config)
    total = 0.0
    for group in geometry.groups:
        copies = 1 if "MLA" in type(group.spec).__name__ else ranks
        total += geometry.hit_tokens / group.block_tokens * block * copies
    return max(1.0, total)
