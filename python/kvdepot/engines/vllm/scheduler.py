"""The scheduler's side: claims hits for waiting requests, plans loads and saves, keeps leases until they are used."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvdepot.engines.vllm.adapters import Adapters
from kvdepot.engines.vllm.facts import canonical_of_version
from kvdepot.engines.vllm.groups import Geometry
from kvdepot.engines.vllm.log import connector_logger, log_hit
from kvdepot.engines.vllm.meta import Blocks, GroupBlocks, Load, LoadReport, RankNamespaces, StepMetadata
from kvdepot.engines.vllm.options import ConnectorOptions
from kvdepot.engines.vllm.requests import Offer, RequestState, RunningLoad
from kvdepot.engines.vllm.saveplan import SavePlan
from kvdepot.engines.vllm.stats import DepotStats
from kvdepot.engines.vllm.taint import Taint
from kvdepot.engines.vllm.versions import WeightsVersion
from kvdepot.engines.vllm.witnesses import Witnesses

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvdepot._native import Depot, Namespace

logger = connector_logger()

CLAIM_WAIT_MS = 2
"""How long a claim that is not settled is waited for at a time while the engine has nothing else to do."""

REST_MS_MAX = 20
"""An idle engine begins a load when the blocks that are still being read will probably have come after so long."""

DECODE_TOKENS_MAX = 16
"""A running request with at most so many tokens in a step decodes, speculated tokens included; else it prefills."""

RANK_STEPS_MAX = 32
"""Steps after which requests do not wait any longer for what the ranks found; the first step tells it."""

MISS_RECHECK_S = 0.5
"""A request that cannot be admitted is matched again at every step; the depot is asked again only this often."""


EXAMINE_S = 30.0
"""How long a request waits for the workers' word on the weights after a reset; then it is computed."""

STALE = "the weights have changed, and vLLM's own cache still has KV of the earlier ones"

RESET_RETRY_S = 0.5
"""How often a depot that did not confirm a reset is asked again."""


class SchedulerSide:
    """State machine of the scheduler's connector. Calls come from one thread.

    A request's hit goes: claim -> offer (settled, told to the scheduler) -> load (sent to the workers) -> reported by
    all ranks, when the claim's leases are dropped. It may end at any point before: then the leases are dropped at once,
    but never while a worker may still copy.
    """

    def __init__(
        self,
        depot: "Depot",
        options: ConnectorOptions,
        geometry: Geometry,
        ranks: int,
        *,
        loads: bool = True,
        dumps: bool = True,
    ) -> None:
        self._depot = depot
        self._options = options
        self._geometry = geometry
        self._ranks = ranks
        # Loading beside the computation needs a load that the step waits for. vLLM cannot recompute after a failure of
        # such a load when there are several groups, so those load before they are scheduled (P2).
        self.loads_before_forward = options.use_layerwise and len(geometry.groups) == 1
        self._namespaces: list[tuple[list[Namespace], int, int]] = []
        self._off = ""
        self._loads, self._dumps = loads, dumps
        self._found: list[RankNamespaces] = []
        self._steps_without_ranks = 0
        self._names: list[list[str]] = []
        self._adapters = Adapters()
        self._weights = WeightsVersion(ranks)
        self._own_cache_left = self._own_cache_stale = False
        self._examined_since_s = 0.0
        self._drop_due: list[Namespace] = []
        self._drop_tried_s = 0.0
        self._drops_what_it_opens = False
        self._requests: dict[str, RequestState] = {}
        self._running_loads: dict[int, RunningLoad] = {}
        self._saves = SavePlan(geometry, options.persist_token_threshold)
        self._step = StepMetadata()
        self._load_ids = 0
        self._idle = self._may_wait = False
        self._witnesses = Witnesses(ranks)
        self._taint = Taint()
        self._waited = False
        self.kv_cache_manager: Any = None
        self.stats = DepotStats()
        if not (loads and dumps):
            logger.info("kvdepot: this engine only %s blocks, by its kv_role", "loads" if loads else "stores")
        if geometry.unsupported:
            self._turn_off(geometry.unsupported)

    def open_namespaces(self, ranks: list[RankNamespaces]) -> None:
        """Takes what the workers found. Until this is called nothing is looked up, loaded or saved."""
        if self._off:
            return
        if broken := next((rank.broken for rank in ranks if rank.broken), ""):
            self._turn_off(broken)
            return
        digests = {rank.rank: rank.weights for rank in ranks}
        if unknown := self._weights.begin(digests, all(rank.named for rank in ranks)):
            self._turn_off(unknown)
            return
        # Ranks with equal bytes (MLA) name one namespace; a pipeline stage without such layers names none.
        self._names = [
            list(dict.fromkeys(rank.canonical[group.index] for rank in ranks if group.index in rank.canonical))
            for group in self._geometry.groups
        ]
        if not self._weights.examining:
            self._open_version()

    def _open_version(self) -> None:
        from kvdepot._native import KVDepotError

        version = self._weights.version or ""
        try:
            self._namespaces = [
                (
                    [self._depot.open_canonical(canonical_of_version(name, version)) for name in names],
                    group.window_blocks,
                    group.hashes_per_block,
                )
                for group, names in zip(self._geometry.groups, self._names, strict=True)
            ]
        except KVDepotError as error:
            self._turn_off(f"its namespaces cannot be opened: {error}")
            return
        if self._drops_what_it_opens:
            self._drops_what_it_opens = False
            self._drop_due = [namespace for names, *_ in self._namespaces for namespace in names]
            self._namespaces = []
            self._drop()
            return
        ids = [namespace.id for names, *_ in self._namespaces for namespace in names]
        logger.info("kvdepot: %d ranks, namespaces %s", self._ranks, ", ".join(ids))

    # Lookup.

    def new_request(self, request: "Request") -> None:
        """``on_new_request``."""
        self._state_of(request)

    def _state_of(self, request: "Request") -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = RequestState(request)
            lora = getattr(request, "lora_request", None)
            if lora is not None:
                state.adapter = self._adapters.digest(lora) or None
        return state

    def match(self, request: "Request", local_tokens: int) -> tuple[int | None, bool]:
        """``get_num_new_matched_tokens``: tokens that the depot has beyond ``local_tokens``; None = not yet known."""
        state = self._state_of(request)
        state.local_tokens = local_tokens
        state.tier_tokens = state.loaded_tokens = 0
        if self._waits_for_ranks() or self._waits_for_weights(state):
            self._waited = True
            return None, False
        if state.offer is not None and state.offer.local_tokens != local_tokens:
            state.drop_offer()
        if not self._may_load(state) or self._missed_lately(state, local_tokens):
            state.drop_offer()
            return 0, False
        offer = state.offer = state.offer or self._claim(state, local_tokens)
        if offer is None:
            return 0, False
        found = self._poll(offer)
        if found is None:
            return None, False
        units, from_tier = found
        tokens = units * self._geometry.hash_tokens - local_tokens
        if tokens <= 0:
            state.drop_offer()
            state.missed_tokens, state.missed_s = local_tokens, time.monotonic()
            return 0, False
        offer.tokens, offer.units_from_tier = tokens, from_tier
        return tokens, not self.loads_before_forward

    def _claim(self, state: RequestState, local_tokens: int) -> Offer | None:
        """Asks the depot for what the engine does not have; None when it could have all of it."""
        skip, limit = self._bounds(state.request, local_tokens)
        if limit <= skip:
            return None
        self.stats.add("claims")
        claim = self._depot.claim(self._namespaces, state.hashes[:limit], skip=skip, limit=limit)
        return Offer(claim, local_tokens)

    def _poll(self, offer: Offer) -> tuple[int, int] | None:
        """The hit in hash units and what of it comes from a tier; None when it is not yet known."""
        settled, units, from_tier = offer.claim.poll()
        if not settled and self._idle and self._may_wait:
            # Scheduling again at once would keep a processor from the threads that fetch the blocks. One request waits
            # for all that wait: another one's claim may be settled.
            self._may_wait = False
            settled, units, from_tier = offer.claim.wait(CLAIM_WAIT_MS)
        if not settled and (time.monotonic() - offer.started_s) * 1e3 >= self._options.wait_ms:
            settled, units, from_tier = offer.claim.settle_now()
        return (units, from_tier) if settled else self._nearly_there(offer)

    def _nearly_there(self, offer: Offer) -> tuple[int, int] | None:
        """The hit, and what of it comes from a tier, when its load may begin before the last blocks have been read.

        Copying what is there takes about as long as they do. The step that waits for them keeps nobody else waiting,
        and not for long: its patience has an end, and what has not come is computed (P2).
        """
        if not (self._idle and self.loads_before_forward and self._options.waits_for_all):
            return None
        arriving = offer.claim.arriving()
        if arriving is None:
            return None
        units, from_tier, come, left = arriving
        rest_ms = (time.monotonic() - offer.started_s) * 1e3 * left / come if come else math.inf
        return (units, from_tier) if rest_ms <= REST_MS_MAX else None

    def _waits_for_ranks(self) -> bool:
        """Whether ranks have not told yet what they found. They do so at the end of the engine's first step."""
        return not self._off and self._misses_ranks() and self._steps_without_ranks < RANK_STEPS_MAX

    def _misses_ranks(self) -> bool:
        return not self._names and len(self._found) < self._ranks

    def _may_load(self, state: RequestState) -> bool:
        return bool(self._namespaces) and self._wants_loads(state)

    def _wants_loads(self, state: RequestState) -> bool:
        request = state.request
        return (
            self._loads
            and not self._off
            and state.adapter is not None
            and not state.load_failed
            and not getattr(request, "skip_reading_prefix_cache", False)
            and request.num_prompt_tokens >= self._options.persist_token_threshold
        )

    @staticmethod
    def _missed_lately(state: RequestState, local_tokens: int) -> bool:
        return state.missed_tokens == local_tokens and time.monotonic() - state.missed_s < MISS_RECHECK_S

    def _bounds(self, request: "Request", local_tokens: int) -> tuple[int, int]:
        """Hash units that the engine has itself, and those that a hit may cover at most."""
        geometry = self._geometry
        tokens: int = request.num_tokens
        if self.loads_before_forward or geometry.windowed:
            # A forward needs a token to compute. After an async load of everything vLLM takes the last token back, but
            # then a window begins one token earlier, where no block was loaded.
            tokens -= 1
        if self._options.hit_ratio is not None:
            tokens = min(tokens, int(self._options.hit_ratio * request.num_prompt_tokens))
        tokens = min(tokens, len(request.block_hashes) * geometry.hash_tokens)
        # Cut before the claim, not after: a shorter hit needs other blocks of a window.
        tokens -= tokens % geometry.hit_tokens
        return local_tokens // geometry.hash_tokens, tokens // geometry.hash_tokens

    # Loads.

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """``update_state_after_alloc``: the request has pages; the hit, if one was used, becomes a load."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        offer, state.offer = state.offer, None
        self._log_once(state, external_tokens)
        page_ids = blocks.get_block_ids()
        # Another connector may load into these before a step computes on them: dumps have to have read them.
        for group in self._geometry.groups:
            pages = page_ids[group.index][state.local_tokens // group.block_tokens :]
            self._step.fresh_pages += [page for page in pages if page]
        if external_tokens <= 0 or offer is None:
            if offer is not None:
                offer.claim.release()
            return
        end_tokens = offer.local_tokens + external_tokens
        plan: GroupBlocks = {}
        unproven: set[int] = set()
        for group in self._geometry.groups:
            wanted = Blocks()
            begin, end = offer.local_tokens // group.block_tokens, end_tokens // group.block_tokens
            for index in range(begin, end):
                page = page_ids[group.index][index]
                if page != 0:  # the null block: before the window, never read
                    wanted.add(state.hashes[(index + 1) * group.hashes_per_block - 1], page)
            if wanted.pages:
                plan[group.index] = wanted
            unproven.update(page for page in page_ids[group.index][begin:] if page)
        state.tier_tokens = min(external_tokens, offer.units_from_tier * self._geometry.hash_tokens)
        state.loaded_tokens = external_tokens
        load_id = self._next_load_id()
        self._running_loads[load_id] = RunningLoad(
            request.request_id, offer.claim, self._ranks, self.loads_before_forward, unproven
        )
        self._step.loads.append(Load(load_id, request.request_id, self.loads_before_forward, plan))
        self.stats.add("hit_tokens", external_tokens)

    def _next_load_id(self) -> int:
        self._load_ids += 1
        return self._load_ids

    def _log_once(self, state: RequestState, external_tokens: int) -> None:
        if not state.logged:
            state.logged = True
            unit = self._geometry.hit_tokens
            log_hit(
                state.request.request_id,
                state.request.num_tokens // unit,
                state.local_tokens // unit,
                max(0, external_tokens) // unit,
            )

    def hit_tier_tokens(self, request: "Request") -> int:
        """How many tokens of the request's last hit came from below the pool."""
        state = self._requests.get(request.request_id)
        return state.tier_tokens if state is not None else 0

    # The step.

    def build_step(self, output: "SchedulerOutput") -> StepMetadata:
        """``build_connector_meta``: everything that the workers shall do in this step."""
        step, self._step = self._step, StepMetadata()
        self._idle = self._may_wait = output.total_num_scheduled_tokens == 0
        step.decoding = any(
            output.num_scheduled_tokens[name] <= DECODE_TOKENS_MAX for name in output.scheduled_cached_reqs.req_ids
        )
        unproven = {load_id: load for load_id, load in self._running_loads.items() if load.before_forward}
        self._follow(list(unproven.values()), output)
        weights = self._weights
        step.generation, step.version = weights.generation, weights.version
        # Not in a step that only ends requests: an engine that is paused for an update has the old weights still.
        step.examine = weights.examining and (self._waited or not self._idle)
        self._waited = False
        # Also without a namespace: dumps of an earlier step may still read these pages.
        self._add_fresh_pages(step, output)
        if not self._namespaces:
            if self._misses_ranks():
                self._note_silent_ranks()
            return step
        step.late_saves = self._saves.released()
        self._saves.overwritten(set(step.fresh_pages))
        saves, foreign = self._saves.complete(output, self._trusted()) if self._dumps else ({}, False)
        if foreign:
            step.witness = self._next_load_id()
            self._witnesses.begin(step.witness)
        # With steps in flight, loads of an earlier step may not have been reported yet, so they count, too.
        doubtful = set(unproven) | self._witnesses.planned(output.num_scheduled_tokens)
        if doubtful:
            self._saves.hold(saves, doubtful)
        else:
            step.saves = saves
        return step

    def _trusted(self) -> Mapping[str, RequestState]:
        if not self._taint:
            return self._requests
        return {name: state for name, state in self._requests.items() if name not in self._taint}

    def _follow(self, loads: Sequence[RunningLoad], output: "SchedulerOutput") -> None:
        """Notes what this step computes on loads that are not reported, or that failed, in the order of scheduling."""
        for load in loads:
            load.steps += 1
        if not loads and not self._taint:
            return
        cached = output.scheduled_cached_reqs
        given = [*zip(cached.req_ids, cached.new_block_ids, strict=True)]
        given += [(new.req_id, new.block_ids) for new in output.scheduled_new_reqs]
        for request_id, page_ids in given:
            for pages in page_ids or ():
                self._taint.follow(request_id, pages)
                for load in loads:
                    load.follow(request_id, pages)
        if self._taint:
            self._evict(self._taint.pages)

    def _add_fresh_pages(self, step: StepMetadata, output: "SchedulerOutput") -> None:
        for new in output.scheduled_new_reqs:
            state = self._requests.get(new.req_id)
            for group in self._geometry.groups:
                # Leading blocks that vLLM had in its own prefix cache are read, not written.
                own = state.local_tokens // group.block_tokens if state is not None else 0
                step.fresh_pages += [page for page in new.block_ids[group.index][own:] if page]
        for page_ids in output.scheduled_cached_reqs.new_block_ids:
            for pages in page_ids or ():
                step.fresh_pages += [page for page in pages if page]
        for copy in getattr(output, "kv_cache_block_copies", None) or ():
            step.fresh_pages.append(copy.dst_block_id)
        step.fresh_pages = list(dict.fromkeys(step.fresh_pages))

    def _note_silent_ranks(self) -> None:
        self._steps_without_ranks += 1
        if self._steps_without_ranks == RANK_STEPS_MAX and not self._off:
            logger.warning("kvdepot: %d of %d ranks have told their namespaces", len(self._found), self._ranks)

    def reported(self, report: LoadReport | None, *, invalid_pages: bool = False) -> None:
        """``update_connector_output``: what ranks found, and loads that ended on some or all of them.

        ``invalid_pages``: some connector has failed to load a page that the step computed on.
        """
        if invalid_pages:
            self._another_failed()
        if report is None:
            return
        if report.broken:
            self._turn_off(report.broken)
        self._found += report.ranks
        if report.ranks and len(self._found) == self._ranks:
            self.open_namespaces(self._found)
        if report.moved is not None:
            self._weights_moved(report.moved)
        if report.weights and self._weights.answered(report.generation, report.weights):
            self._settle_weights()
        for load_id in report.failed:
            self._load_failed(load_id)
        for load_id, ranks in report.done.items():
            if self._witnesses.reported(load_id, ranks) or self._load_ended(load_id, ranks):
                self._saves.load_was_good(load_id)

    def _load_failed(self, load_id: int) -> None:
        load = self._running_loads.get(load_id)
        self._saves.load_failed(load_id)
        if load is None:
            return
        if load.before_forward:
            self._evict(load.pages)
            if load.steps > 1:  # a step was planned meanwhile
                self._distrust(load.readers)
        state = self._requests.get(load.request_id)
        if state is not None:
            state.load_failed = True
            state.saved_blocks = {}

    def _distrust(self, request_ids: Iterable[str]) -> None:
        """These compute on garbage that vLLM takes for good."""
        for request_id in request_ids:
            if request_id in self._requests:
                held = getattr(self.kv_cache_manager, "get_block_ids", None)
                pages = held(request_id) if held is not None else ()
                self._taint.add(request_id, (page for group in pages for page in group))
        if self._taint:
            self._evict(self._taint.pages)

    def _load_ended(self, load_id: int, ranks: int) -> bool:
        """So many ranks have ended a load; whether all have now."""
        load = self._running_loads.get(load_id)
        if load is None:
            return False
        load.ranks_left -= ranks
        if load.ranks_left > 0:
            return False
        del self._running_loads[load_id]
        load.claim.release()
        return True

    def _another_failed(self) -> None:
        """Steps that may have computed on it are not saved. vLLM computes its requests again, and that is saved."""
        numbers, request_ids, later_ids = self._witnesses.failed()
        for number in numbers:
            self._saves.load_failed(number)
        for request_id in request_ids & self._requests.keys():
            self._requests[request_id].saved_blocks = {}
        self._distrust(later_ids)

    def _turn_off(self, why: str) -> None:
        """A rank cannot take part after all, so none does."""
        logger.error("kvdepot is off, requests are computed as without it: %s", why)
        self._off = why
        self._weights.doubt(examine=False)
        self._close_namespaces()

    def _close_namespaces(self) -> None:
        """Nothing is looked up, loaded or saved from now on; loads under way keep their leases until reported."""
        self._namespaces = []
        self._saves.clear()
        for state in self._requests.values():
            state.drop_offer()
            # They may start again before there are namespaces again, and what was stored so far is in none of those.
            state.saved_blocks = {}

    def _evict(self, pages: set[int]) -> None:
        """Takes what a failed load left, and what was computed on it, out of vLLM's prefix cache.

        vLLM publishes blocks of a load that a step waits for before it is done, and leaves them there while they are
        computed again, and for good when the request was aborted meanwhile: another request that hits them would
        compute on garbage, and we would store it (P1). A page that somebody else has by now costs a cached block.
        """
        evict = getattr(self.kv_cache_manager, "evict_blocks", None)
        if evict is not None:
            evict(pages)

    def has_late_saves(self) -> bool:
        """Whether the engine has to take one more step even when no request is left."""
        return self._saves.waiting()

    def finished(self, request_id: str) -> None:
        """``request_finished``: its loads, if some still run, keep their leases until all ranks have reported."""
        self._taint.ended(request_id)
        state = self._requests.pop(request_id, None)
        if state is not None:
            state.drop_offer()

    # Weights that change in place.

    def reset(self) -> bool:
        """``reset_cache``: KV of other weights than those that the workers have now is not served again (P1).

        vLLM calls it after a change of weights and, without one, before it sleeps and when it pauses: the workers are
        asked which it was, and until they have answered nothing is looked up, loaded or saved. That needs no depot.
        """
        if self._off:
            return True
        if self._options.drop_at_reset and not self._names:
            self._drops_what_it_opens = True
        elif self._options.drop_at_reset:
            self._drop_due = [namespace for names, *_ in self._namespaces for namespace in names] or self._drop_due
            self._drop()
        self._own_cache_left = not self._own_cache_is_empty()
        self._own_cache_stale = self._own_cache_stale and self._own_cache_left
        self._examined_since_s = 0.0
        self._weights.doubt(examine=True)
        self._close_namespaces()
        return True

    def _own_cache_is_empty(self) -> bool:
        """Whether vLLM's own cache was reset as well: it keeps everything while a request has blocks."""
        pool = getattr(self.kv_cache_manager, "block_pool", None)
        if pool is None:
            return not self._requests
        return bool(pool.num_gpu_blocks - pool.get_num_free_blocks() <= 1)  # the null block is never free

    def _waits_for_weights(self, state: RequestState) -> bool:
        """Whether the request is not scheduled yet, because what the workers will say decides what it finds."""
        if self._drop_due:
            self._drop()
        if not self._weights.examining or not self._wants_loads(state):
            return False
        now = time.monotonic()
        self._examined_since_s = self._examined_since_s or now
        return now - self._examined_since_s <= EXAMINE_S

    def _weights_moved(self, generation: int) -> None:
        """A rank has found other weights than those of this generation, and nobody has reset a cache."""
        if self._off or generation != self._weights.generation or self._weights.version is None:
            return
        logger.error("kvdepot is off until the next reset_prefix_cache(reset_connector=True): %s", STALE)
        self._weights.doubt(examine=False)
        self._own_cache_stale = True
        self._close_namespaces()

    def _settle_weights(self) -> None:
        """The workers have said what weights they have."""
        changed = self._weights.settled()
        if self._off:
            return
        self._own_cache_stale = self._own_cache_stale or (changed and self._own_cache_left)
        if self._own_cache_stale:
            # vLLM could not reset its own cache, because requests were running, and others will compute on it.
            logger.error("kvdepot is off until the next reset_prefix_cache(reset_connector=True): %s", STALE)
            self._weights.doubt(examine=False)
            return
        logger.info("kvdepot: the weights %s", "have changed" if changed else "are the same, what is stored stays")
        if not self._drop_due:
            self._open_version()

    def _drop(self) -> None:
        """Has the depot forget what it stores for everybody; nothing is looked up before it has confirmed that."""
        from kvdepot._native import KVDepotError

        now = time.monotonic()
        if self._drop_tried_s and now - self._drop_tried_s < RESET_RETRY_S:
            return
        try:
            self._depot.reset(self._drop_due)
        except KVDepotError as error:
            self._drop_tried_s = time.monotonic()
            logger.error("kvdepot: the depot did not confirm the reset, it is asked again: %s", error)  # noqa: TRY400
            return
        self._drop_due, self._drop_tried_s = [], 0.0
        if self._weights.version is not None and not self._namespaces:
            self._open_version()

    def close(self) -> None:
        """``shutdown``."""
        for state in self._requests.values():
            state.drop_offer()
        for load in self._running_loads.values():
            load.claim.release()
        self._depot.close()
