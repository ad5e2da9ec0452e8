"""The connector class that vLLM loads: one method per hook, which delegates to the scheduler's or the worker's side."""

# ruff: noqa: ARG002, D102, S101 - names and arguments are vLLM's, its base class documents them; asserts say which side

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvdepot.engines.attachment import attach
from kvdepot.engines.vllm.attachment import NoDepot, socket_of
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.meta import LoadReport, StepMetadata
from kvdepot.engines.vllm.options import ConnectorOptions, read_options
from kvdepot.engines.vllm.releases.sleep import calls_hooks
from kvdepot.engines.vllm.siblings import has_siblings
from kvdepot.engines.vllm.sources import all_on_this_node
from kvdepot.engines.vllm.stats import DepotStats, stats_from

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvdepot import Depot
    from kvdepot.engines.vllm.events import DepotEvents
    from kvdepot.engines.vllm.groups import Geometry
    from kvdepot.engines.vllm.lite import LiteScheduler, LiteWorker
    from kvdepot.engines.vllm.metrics import DepotPromMetrics
    from kvdepot.engines.vllm.presence import Presence
    from kvdepot.engines.vllm.recording import Recording
    from kvdepot.engines.vllm.scheduler import SchedulerSide
    from kvdepot.engines.vllm.worker import WorkerSide

logger = connector_logger()

# With every attention backend that accepts another layout than its own, a block of one of these sizes is one kernel
# block. A larger one may be split, which block-outermost layouts forbid: vLLM would not start. That includes 128, which
# UCM recommends: FlashInfer's kernels take at most 64 before Blackwell. In vLLM's own layout such a block is one run of
# memory for each layer, eight times as long as that of a block of 16.
UNSPLIT_BLOCK_SIZES = (16, 32, 64)


def is_child(vllm_config: "VllmConfig") -> bool:
    """Returns whether `MultiConnector` made this configuration for a connector below it."""
    from vllm.config import get_current_vllm_config_or_none

    current = get_current_vllm_config_or_none()
    outer = current.kv_transfer_config if current is not None else None
    return outer is not None and outer.kv_connector != vllm_config.kv_transfer_config.kv_connector


class KVDepotConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc, unused-ignore]
    """Stores vLLM's KV blocks in a depot, and loads them from it."""

    # This is a cache, not a hand-over: preempting a request loses nothing that another engine waits for.
    requires_kv_delivery = False

    _scheduler: "SchedulerSide | LiteScheduler | None" = None
    _worker: "WorkerSide | LiteWorker | None" = None
    _presence: "Presence | None" = None
    _recording: "Recording | None" = None
    _events: "DepotEvents | None" = None

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        from kvdepot.engines.vllm.early import check
        from kvdepot.engines.vllm.graphs import may_replay_whole_steps
        from kvdepot.engines.vllm.groups import geometry
        from kvdepot.engines.vllm.nodes import within_reach
        from kvdepot.engines.vllm.step_order import step_order

        extra_config = self._kv_transfer_config.kv_connector_extra_config
        check(extra_config, vllm_config)
        options = replace(
            read_options(extra_config),
            replays=may_replay_whole_steps(vllm_config),
            shares_prefixes=bool(vllm_config.cache_config.enable_prefix_caching),
            step_order=step_order(vllm_config, kv_cache_config),
        )
        self._tiers_are_local = all_on_this_node(options.config.tiers)
        parallel = vllm_config.parallel_config
        # Before anything is started, read or registered: the connector may not support the model, or its ranks' places.
        shape = geometry(vllm_config, kv_cache_config)
        shape = within_reach(shape, parallel, shares_a_tier=options.may_share_a_tier)
        if role == KVConnectorRole.SCHEDULER and options.config.enable_record_traces:
            from kvdepot.engines.vllm.recording import record

            self._recording = record(options.config, shape)
        if options.config.use_lite:
            self._count_only(options, role, shape, kv_cache_config)
            return
        depot: Any = NoDepot() if shape.unsupported else self._attach(options, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            from kvdepot.engines.vllm.adapters import Adapters
            from kvdepot.engines.vllm.drafts import drafts_of
            from kvdepot.engines.vllm.option_facts import lora_options
            from kvdepot.engines.vllm.request_spans import SchedulerSpans
            from kvdepot.engines.vllm.scheduler import SchedulerSide

            role_flags = self._kv_transfer_config
            self._scheduler = SchedulerSide(
                depot,
                options,
                shape,
                parallel.world_size,
                loads=role_flags.is_kv_consumer,
                dumps=role_flags.is_kv_producer,
                drafts=drafts_of(vllm_config, kv_cache_config),
                adapters=Adapters(lora_options(vllm_config)),
                spans=SchedulerSpans.of_process(),
                has_siblings=has_siblings(self),
            )
            self._let_vllm_recompute(options.load_failure_policy)
            self._tell_events(depot, shape)
        else:
            from kvdepot.engines.vllm.request_spans import WorkerSpans
            from kvdepot.engines.vllm.worker import WorkerSide

            self._worker = WorkerSide(depot, options, shape, WorkerSpans.of_process(), has_siblings=has_siblings(self))

    def _tell_events(self, depot: Any, shape: "Geometry") -> None:
        from kvdepot.engines.vllm.events import DepotEvents, wants_events

        if wants_events(self._vllm_config) and not shape.unsupported:
            self._events = DepotEvents(depot, shape)

    def _count_only(
        self, options: ConnectorOptions, role: KVConnectorRole, shape: "Geometry", kv_cache_config: "KVCacheConfig"
    ) -> None:
        from kvdepot.engines.vllm.lite import LiteScheduler, LiteWorker, unit_bytes

        if role == KVConnectorRole.SCHEDULER:
            ranks = self._vllm_config.parallel_config.world_size
            self._scheduler = LiteScheduler(options, shape, unit_bytes(shape, kv_cache_config, ranks))
        else:
            self._worker = LiteWorker()

    def _attach(self, options: ConnectorOptions, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> "Depot":
        from kvdepot.engines.vllm.presence import Place, Presence, taken_sizes

        stages = self._vllm_config.parallel_config.pipeline_parallel_size
        engine_id = str(self._kv_transfer_config.engine_id)
        socket, block_bytes = socket_of(options, kv_cache_config, engine_id, stages)
        depot = attach(options.config, engine_id, block_bytes)
        if role == KVConnectorRole.SCHEDULER:
            self._presence = Presence(depot, Place.of(options.config, socket))
            self._presence.begin(taken_sizes(options.config))
        return depot

    def _let_vllm_recompute(self, wanted: Literal["recompute", "fail"]) -> None:
        """Makes vLLM recompute after a failed load; by default it fails the request, but a cache must not (P2).

        The scheduler reads the policy after it has created its connector. The default is indistinguishable from the
        user's own ``fail``, so users who want that set ``load_failure_policy: fail`` in the connector's own
        configuration.
        """
        if self._kv_transfer_config.kv_load_failure_policy != wanted:
            logger.info("kvdepot: kv_load_failure_policy is now %r: a failed load is computed, not an error", wanted)
            self._kv_transfer_config.kv_load_failure_policy = wanted

    # Class-level questions.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """Requests a layout with one run of memory per block where that is known to be possible and useful.

        A child of `MultiConnector` requests nothing, because vLLM does not start when two children request different
        layouts. A page of any block-compact layout is one run per layer.
        """
        try:
            from vllm.platforms import current_platform
            from vllm.v1.kv_cache_layout import KVCacheLayout
        except ImportError:
            return None
        model = vllm_config.model_config
        options = read_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if (
            is_child(vllm_config)
            or options.config.use_lite
            or not options.wants_own_layout
            or not current_platform.is_cuda_alike()
            or model.use_mla
            or model.is_hybrid
            or vllm_config.cache_config.block_size not in UNSPLIT_BLOCK_SIZES
        ):
            return None
        return KVCacheLayout.BLHNC.name

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Returns whether steps may load layer by layer, which a replayed graph would not wait for."""
        from kvdepot.engines.vllm.early import caller_config
        from kvdepot.engines.vllm.graphs import steps_may_load

        options = read_options(extra_config)
        if options.config.use_lite or not options.use_layerwise:
            return False
        vllm_config = caller_config()
        return vllm_config is None or steps_may_load(vllm_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DepotStats:
        return stats_from(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "DepotPromMetrics":
        # Below `MultiConnector`, a connector without these crashes the engine with its first statistics.
        from kvdepot.engines.vllm.metrics import DepotPromMetrics

        return DepotPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._on_scheduler.kv_cache_manager = kv_cache_manager

    def on_new_request(self, request: "Request") -> None:
        self._on_scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._on_scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._on_scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        below = min(num_external_tokens, self._on_scheduler.hit_tier_tokens(request))
        source = CacheHitSource.DISK if self._tiers_are_local else CacheHitSource.EXTERNAL_UNSPECIFIED
        found = {CacheHitSource.HOST: num_external_tokens - below, source: below}
        return {source: tokens for source, tokens in found.items() if tokens}

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        if self._presence is not None:
            self._presence.look()
        return self._on_scheduler.build_step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        report = getattr(connector_output, "kv_connector_worker_meta", None)
        invalid = bool(getattr(connector_output, "invalid_block_ids", None))
        self._on_scheduler.reported(report if isinstance(report, LoadReport) else None, invalid_pages=invalid)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        # vLLM may reuse the pages immediately: an overwriting step waits for the dump that still reads them (P3).
        if self._recording is not None:
            self._recording.ended(request)
        self._on_scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_late_saves()

    def reset_cache(self) -> bool:
        return self._on_scheduler.reset()

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        hooks = calls_hooks(KVConnectorBase_V1)
        self._on_worker.register(self._vllm_config, self._kv_cache_config, kv_caches, sleep_hooks=hooks)

    def unregister_kv_caches(self) -> None:
        self._on_worker.sleep()

    def restore_kv_caches(self) -> None:
        self._on_worker.wake_up()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._on_worker.prepare(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._on_worker.start_loads(self._bound_step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._on_worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._on_worker.save_layer(layer_name, self._bound_step)

    def wait_for_save(self) -> None:
        self._on_worker.finish_saves(self._bound_step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._on_worker.finished_loads() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self._on_worker.failed_loads()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._on_worker.failed_pages()

    def build_connector_worker_meta(self) -> LoadReport | None:
        return self._on_worker.report()

    # Both.

    def get_kv_connector_stats(self) -> DepotStats | None:
        side = self._scheduler or self._worker
        if side is None:
            return None
        if self._presence is not None and (attached := self._presence.changed()) is not None:
            side.stats.tell("attached", int(attached))
        if self._recording is not None:
            self._recording.count(side.stats)
        return side.stats.take()

    def take_events(self) -> Iterable[Any]:
        if self._events is None:
            return ()
        return self._events.take(getattr(self._on_scheduler, "namespace_groups", ()))

    def shutdown(self) -> None:
        if self._events is not None:
            self._events.close()
        side = self._scheduler or self._worker
        if side is not None:
            side.close()
        if self._recording is not None:
            self._recording.close()

    @property
    def _on_scheduler(self) -> "SchedulerSide | LiteScheduler":
        assert self._scheduler is not None, "called on a worker's connector"
        return self._scheduler

    @property
    def _on_worker(self) -> "WorkerSide | LiteWorker":
        assert self._worker is not None, "called on the scheduler's connector"
        return self._worker

    @property
    def _bound_step(self) -> StepMetadata:
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        return step
