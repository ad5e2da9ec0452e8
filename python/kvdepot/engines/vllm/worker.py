"""The worker's side: copies between the engine's pages and the depot, as planned by the scheduler's connector."""

import atexit
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvdepot.engines.vllm.compute import ComputeOrder
from kvdepot.engines.vllm.facts import draft_facts, engine_facts, names_weights
from kvdepot.engines.vllm.groups import Geometry
from kvdepot.engines.vllm.holdings import holding_of
from kvdepot.engines.vllm.live import LiveWeights, caller_with
from kvdepot.engines.vllm.loaded_adapters import LoadedAdapters
from kvdepot.engines.vllm.loads import Loads
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.meta import AdapterName, LoadReport, RankNamespaces, StepMetadata
from kvdepot.engines.vllm.nodes import this_node
from kvdepot.engines.vllm.options import ConnectorOptions
from kvdepot.engines.vllm.ranks import is_last_stage, rank_number, this_rank
from kvdepot.engines.vllm.releases.sleep import may_sleep, watch_sleep
from kvdepot.engines.vllm.releases.updates import watch_updates
from kvdepot.engines.vllm.saves import Saves
from kvdepot.engines.vllm.selftest import self_test
from kvdepot.engines.vllm.stats import DepotStats
from kvdepot.engines.vllm.stores import GroupStore

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvdepot import Depot
    from kvdepot.engines.vllm.request_spans import WorkerSpans

logger = connector_logger()

IDLE_S = 0.1
"""Seconds of a pause between steps after which a sample of the weights is checked, even without a known update."""

NO_DEPOT_TO_PROVE = (
    "no depot answered when the engine allocated its KV cache, and the test of its layout would later write to pages "
    "that other connectors below MultiConnector use: start the depot first, and then this engine again"
)

_written_for_ever: list[object] = []
"""KV caches that a hung device may still write to: they stay allocated for the lifetime of this process (P1)."""


class WorkerSide:
    """One rank's connector. Calls come from the worker's one thread; copies run in the core's threads.

    vLLM fixes the order within a step: ``prepare`` (before the step writes to any page), ``start_loads`` (before the
    forward if it depends on a load, else after), the layers' hooks, ``finish_saves``, ``finished_loads``, ``report``.
    Where a model runner deviates from it, ``StepOrder`` says so.
    """

    def __init__(
        self,
        depot: "Depot",
        options: ConnectorOptions,
        geometry: Geometry,
        spans: "WorkerSpans | None" = None,
        *,
        has_siblings: bool = False,
    ) -> None:
        """``has_siblings``: other connectors of this engine read and write the same pages, whenever they like."""
        self._depot = depot
        self._has_siblings = has_siblings
        self._options = options
        self._geometry = geometry
        self._stores: dict[int, GroupStore] = {}
        self._kv_caches: Mapping[str, torch.Tensor] = {}
        self._kv_cache_config: KVCacheConfig | None = None
        self._names = RankNamespaces(broken=geometry.unsupported, node=this_node())
        self._order = ComputeOrder(options.enable_event_sync)
        self.stats = DepotStats()
        self._loads = Loads(
            self._stores,
            options,
            self.stats,
            recompute_by_block=geometry.recomputes_by_block,
            order=self._order,
            spans=spans,
        )
        self._saves = Saves(self._stores, self._order, self.stats, spans)
        self._spans = spans
        self._weights = LiveWeights(None)
        self._adapters = LoadedAdapters()
        self._changed_adapters: set[AdapterName] = set()
        self._generation, self._version = 0, ""
        self._examined = 0
        self._moved: int | None = None
        self._weights_used = False
        self._updated = self._update_goes_on = False
        self._sampled = ""
        self._ended_s = 0.0
        self._asleep = self._stopped = False
        self._proof_is_due = False
        self._handled_before: BaseException | None = None
        self._forward_broke_off = False
        self._names_told = False
        self._witnesses: list[int] = []
        self._timed = 0
        self._open: StepMetadata | None = None
        self._saves_at_report = False

    def register(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        kv_caches: Mapping[str, "torch.Tensor"],
        *,
        sleep_hooks: bool = False,
    ) -> None:
        """Takes the engine's tensors: opens their namespaces, and verifies that their bytes survive a round trip.

        A failure disables the connector on all ranks, not the engine (P1, P6).

        ``sleep_hooks``: vLLM itself calls ``sleep`` and ``wake_up``.
        """
        if self._names.broken:
            return
        # The core's threads read and write this memory: it has to outlive their last copy, even if the engine is
        # dropped or the interpreter exits without notifying us (P3). A copy, because the engine may change the mapping.
        self._kv_caches = kv_caches = dict(kv_caches)
        self._kv_cache_config = kv_cache_config
        atexit.register(self.close)
        try:
            last_stage = is_last_stage(vllm_config)
            # Where the draft is.
            self._weights = LiveWeights.of(vllm_config, last_stage and "draft_model" in draft_facts(vllm_config))
            self._names.rank, self._names.weights = rank_number(vllm_config), self._weights.digest()
            self._saves_at_report = self._options.step_order.defers_saves and not last_stage
            self.stats.first_rank = self._names.rank == 0
            if self._spans is not None:
                self._spans.rank = self._names.rank
            self._sampled = self._weights.sample()
            watch_updates(caller_with("wake_up"), self.weights_updated)
            if getattr(vllm_config, "lora_config", None) is not None:
                self._adapters.watch(caller_with("get_model"))
            if may_sleep(vllm_config.model_config) and not sleep_hooks:
                watch_sleep(caller_with("wake_up"), self.sleep, self.wake_up)
            self._open_stores(vllm_config, kv_cache_config, kv_caches)
            if not self._proves():
                self._postpone_proof()
        except Exception as error:  # after any failure, an engine without a cache is better than none
            if self._options.use_gdr is True:
                raise  # requested explicitly, but unavailable: the configuration is wrong (P10)
            logger.exception("kvdepot cannot use this engine's KV cache")
            self._names = RankNamespaces(broken=f"{type(error).__name__}: {error}")
            self._stores.clear()

    def _postpone_proof(self) -> None:
        """Leaves the self-test for the first step that has a depot, unless other connectors use the pages by then (P1).

        The test restores the pages that it has written to: what another connector receives there meanwhile would be
        lost, and what it sends would be the test's pattern. Only before the first step does it use none.
        """
        if self._has_siblings:
            self._names = RankNamespaces(broken=NO_DEPOT_TO_PROVE)
            self._stores.clear()
            return
        logger.warning("kvdepot: no depot yet: the KV cache's layout is tested when one answers")
        self._proof_is_due = True
        self._refuse()

    def _proves(self) -> bool:
        """Runs the self-test. Returns false if there is no depot for it."""
        config = self._kv_cache_config
        return config is not None and self_test(self._depot, self._stores, self._kv_caches, config, self._options)

    def _prove_late(self) -> None:
        """Runs the self-test that had no depot at the start. Until it passes nothing is loaded or dumped (P1).

        So no copy is in flight; no step computes, because this is called at the beginning of one; and there is no other
        connector.
        """
        try:
            if not self._proves():
                return
        except Exception as error:  # as at the start: an engine without a cache is better than none
            logger.exception("kvdepot cannot use this engine's KV cache")
            self._stop(error)
            return
        self._proof_is_due = False
        self._refuse()

    def _stop(self, error: Exception) -> None:
        """Withdraws this rank, and thereby all ranks. Work that is already planned fails (P1)."""
        self._loads.report_broken(f"{type(error).__name__}: {error}")
        self._stopped, self._proof_is_due = True, False
        self._refuse()

    def _refuse(self) -> None:
        """Refuses loads and dumps while the layout is unproven, and while the pages have no memory."""
        self._loads.refused = self._proof_is_due or self._asleep or self._stopped or self._moved is not None

    # The weights.

    def _follow_weights(self, step: StepMetadata) -> None:
        """Reports the weights in memory when asked, and switches to the namespaces of their version once known."""
        if step.examine and step.generation != self._examined:
            self._examined = step.generation
            self._updated = self._update_goes_on
            # Weights that are still arriving have no digest, even if none has changed yet.
            digest = "" if self._update_goes_on else self._weights.digest()
            self._loads.report_weights(step.generation, self._names.rank, digest)
            self._sampled = self._weights.sample()
        elif (
            step.version is not None
            and self._moved is None
            and (self._updated or time.monotonic() - self._ended_s > IDLE_S)
        ):
            self._look_for_a_change(step.generation)
        if self._moved is not None and step.generation > self._moved:
            self._moved = None
            self._refuse()
        if step.version is None or (step.generation, step.version) == (self._generation, self._version):
            return
        self._generation = step.generation
        if step.version != self._version:
            self._version = step.version
            self._reopen_stores()

    def weights_updated(self, goes_on: bool) -> None:
        """Notes that vLLM's worker writes weights. ``goes_on``: others may follow until the next call."""
        self._updated, self._update_goes_on = True, goes_on

    def _look_for_a_change(self, generation: int) -> None:
        """Detects weights that were replaced without a reset: by vLLM's own methods, or found in a sample of them.

        What this step was to load belongs to other weights, and what it computes builds on KV of other weights, which
        vLLM still has in its own cache. Neither is used until a reset has cleared that (P1). Before the first step that
        computes or loads there is no such KV, unless another connector has loaded some.
        """
        sampled = self._weights.sample()
        if sampled == self._sampled and not self._updated:
            return
        self._updated = self._update_goes_on
        self._sampled, self._moved = sampled, generation
        self._loads.report_moved(generation, unused=not self._weights_used and not self._has_siblings)
        self._refuse()

    def _reopen_stores(self) -> None:
        # Copies of the earlier version must end first: they use its stores.
        self._saves.wait_for_all()
        self._loads.wait_for_all()
        owner = tuple(self._kv_caches.values())
        try:
            for index, store in self._stores.items():
                self._stores[index] = store.of_version(self._depot, self._version, self._options, owner)
        except Exception as error:  # as at the start: an engine without a cache is better than none
            logger.exception("kvdepot cannot follow the engine's weights")
            self._stop(error)

    # Sleep.

    def sleep(self) -> None:
        """``unregister_kv_caches``: ends copies and registrations, as the pages are about to lose their memory (P3).

        May be called again before ``wake_up``.
        """
        if self._asleep:
            return
        self._saves.wait_for_all()
        self._loads.wait_for_all()
        closed = [store.close(self._options.timeout_ms) for store in self._stores.values()]
        self._asleep = True
        self._refuse()
        if not all(closed):
            logger.error(
                "kvdepot: a copy has not completed, but its memory is about to be freed: the connector is disabled"
            )
            self._stop(RuntimeError("a copy has not completed before the engine's sleep"))

    def wake_up(self) -> None:
        """``restore_kv_caches``: the pages have memory again, at the same addresses."""
        if not self._asleep:
            return
        self._asleep = False
        self._refuse()
        self._reopen_stores()

    def _open_stores(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        kv_caches: Mapping[str, "torch.Tensor"],
    ) -> None:
        rank = this_rank(vllm_config, kv_cache_config)
        facts = engine_facts(vllm_config, kv_cache_config, self._options.weights_version)
        self._names.named = names_weights(facts)
        owner = tuple(kv_caches.values())
        first_slice = self._names.rank < vllm_config.parallel_config.tensor_parallel_size
        for group in self._geometry.groups:
            held = holding_of(vllm_config, facts, group, kv_caches, kv_cache_config.num_blocks, rank, self._options)
            if held is None:
                continue
            store = GroupStore.open(self._depot, held.stored, self._options, held.share, owner)
            self._stores[group.index] = store
            self._names.canonical[group.index] = tuple(namespace.description for namespace in store.namespaces)
            first_slice = first_slice and held.first
            logger.info(
                "kvdepot: group %d, %d layers, %d bytes a block in %d shards, namespace %s%s",
                group.index,
                len(store.layer_names),
                store.block_bytes,
                store.shard_count,
                ", ".join(namespace.id for namespace in store.namespaces),
                f" (one of {held.share.count} ranks that share its dumps)" if held.share.count > 1 else "",
            )
        self.stats.first_slice = first_slice

    # The step, in vLLM's order.

    def prepare(self, step: StepMetadata) -> None:
        """``handle_preemptions``: the last moment at which pages still hold what the previous step left in them."""
        if self._open is not None:  # vLLM ends most failed steps without notice
            self._loads.finish_before_forward()
            self._give_up_step()
        self._open = step
        if self._forward_broke_off:
            # Not earlier: the report of a failed step does not reach the scheduler.
            self._forward_broke_off = False
            self._loads.report_broken("a forward broke off, and what is computed on the KV that it left is not stored")
        self._handled_before = sys.exc_info()[1]
        if not self._asleep:
            self._follow_weights(step)
            if self._proof_is_due:
                self._prove_late()
        self._weights_used = self._weights_used or step.computes or bool(step.loads)
        if not self._loads.refused:
            self._saves.dump(step.late_saves)
        if self._options.step_order.clears_first:
            self._saves.wait_for_all()  # if this step fails, the next one may clear pages before it tells us
        fresh = set(step.fresh_pages)
        # From now on the engine may write to these pages: dumps must have read them, abandoned loads have stopped (P3).
        self._saves.fence(fresh)
        self._loads.fence(fresh)

    def start_loads(self, step: StepMetadata) -> None:
        """``start_load_kv``."""
        if not self._loads.refused:
            for store in self._stores.values():
                store.set_decoding(step.decoding)
        self._loads.start(step.loads)

    def wait_for_layer(self, layer_name: str) -> None:
        """``wait_for_layer_load``."""
        self._loads.wait_for_layer(layer_name)

    def save_layer(self, layer_name: str, step: StepMetadata) -> None:
        """``save_kv_layer``."""
        if self._options.saves_in_steps and not self._loads.refused:
            self._saves.submit_layer(layer_name, step.saves)

    def finish_saves(self, step: StepMetadata) -> None:
        """``wait_for_save``: submits everything that the layers' hooks have not; full CUDA graphs skip the hooks.

        vLLM's first runner calls this in a ``finally``, so also for a forward that failed midway, with its exception
        propagating. An exception that was being handled before the step is the caller's own. The second runner calls
        it for whole steps only, so there exceptions say nothing.
        """
        if self._saves_at_report and self._open is None:
            return  # the report has done it
        self._open = None
        broke_off = not self._options.step_order.ends_whole_steps and sys.exc_info()[1] is not self._handled_before
        self._handled_before = None
        if step.witness:
            self._witnesses.append(step.witness)
        if step.adapted:
            self._witnesses.append(step.adapted)
        self._changed_adapters |= self._adapters.changed(step.adapters)
        self._timed = step.timed or self._timed
        self._loads.finish_before_forward()
        if broke_off:
            self._give_up_step()
        else:
            self._saves.finish_step(step.saves if not self._loads.refused else {})
        if self._options.step_order.clears_first:
            self._saves.wait_for_all()  # the next step clears pages before ``prepare``

    def _give_up_step(self) -> None:
        """Discards the step's saves: the engine may go on after a failed forward, but on untrusted KV (P1)."""
        self._saves.give_up_step()
        self._saves.stopped = self._forward_broke_off = True

    def finished_loads(self) -> set[str]:
        """Returns the requests whose asynchronous loads have ended since the last call."""
        # With a draft model vLLM asks for these, and for failed pages, before ``wait_for_save``: a failure reported a
        # step later would already have produced a token.
        self._loads.finish_before_forward()
        return self._loads.finished()

    def failed_loads(self) -> set[str]:
        """Returns requests whose loads failed, for models of which vLLM cannot recompute single blocks."""
        return self._loads.take_failed_requests()

    def failed_pages(self) -> set[int]:
        """``get_block_ids_with_load_errors``."""
        return self._loads.take_failed_pages()

    def report(self) -> LoadReport | None:
        """``build_connector_worker_meta``: the end of a step."""
        # vLLM 0.29 and 0.30 do not end a step without tokens. Others are not ended here: a draft is still to come.
        if self._open is not None and (self._saves_at_report or not self._open.computes):
            self.finish_saves(self._open)
        self._ended_s = time.monotonic()
        report = self._loads.take_report()
        if self._names_told and not self._witnesses and not self._timed and not self._changed_adapters:
            return report
        report = report or LoadReport()
        if not self._names_told:
            self._names_told = True
            report.ranks = [self._names]
        report.done.update(dict.fromkeys(self._witnesses, 1))
        report.timed = self._timed
        report.changed_adapters, self._changed_adapters = self._changed_adapters, set()
        self._witnesses.clear()
        self._timed = 0
        return report

    def close(self) -> None:
        """``shutdown``: releases the engine's memory, which is freed after this."""
        atexit.unregister(self.close)
        self._saves.close()
        if not self._loads.close():
            logger.warning("a device hangs in a load: the KV cache stays allocated until this process ends")
            _written_for_ever.append(self._kv_caches)
        for store in self._stores.values():
            store.close()
        self._stores.clear()
        self._depot.close()
        self._kv_caches = {}
