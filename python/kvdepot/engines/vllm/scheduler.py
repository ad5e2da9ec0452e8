"""The scheduler's side: claims hits for waiting requests, plans loads and saves, holds leases until they are used."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import kvdepot
from kvdepot.engines.vllm.adapters import Adapters
from kvdepot.engines.vllm.asks import Asks, is_prefilled_remotely
from kvdepot.engines.vllm.drafts import Drafts
from kvdepot.engines.vllm.groups import Geometry
from kvdepot.engines.vllm.loadplan import LeasedLoad, planned_blocks
from kvdepot.engines.vllm.log import connector_logger, log_hit
from kvdepot.engines.vllm.lookup import (
    MISSES,
    PENDING,
    Bounds,
    Hit,
    HitLimits,
    IdleTime,
    Lookup,
    Miss,
    Patience,
    Pending,
)
from kvdepot.engines.vllm.meta import (
    AdapterName,
    AdapterUse,
    Load,
    LoadReport,
    RankNamespaces,
    StepMetadata,
)
from kvdepot.engines.vllm.namespaces import EngineNamespaces
from kvdepot.engines.vllm.options import ConnectorOptions
from kvdepot.engines.vllm.rank_reports import UntilAllRanks
from kvdepot.engines.vllm.rates import Rates
from kvdepot.engines.vllm.requests import RequestState
from kvdepot.engines.vllm.saveplan import SavePlan
from kvdepot.engines.vllm.shared_loads import WAIT_S_MAX, SharedLoads, Wait
from kvdepot.engines.vllm.stats import DepotStats
from kvdepot.engines.vllm.taint import Taint
from kvdepot.engines.vllm.turns import Turns
from kvdepot.engines.vllm.witnesses import Witnesses

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvdepot import Depot, Group
    from kvdepot.engines.vllm.request_spans import SchedulerSpans

logger = connector_logger()

DECODE_TOKENS_MAX = 16
"""A running request with at most this many tokens in a step, including speculated ones, decodes; else it prefills."""

ADAPTER_S = 5.0
"""Seconds that a request waits for the digest of its LoRA adapter, since its files began to be read; others go on."""

MISS_RECHECK_S = 0.5
"""Seconds until the depot is asked again for a request that missed; vLLM matches a waiting request at every step."""


def given_pages(output: "SchedulerOutput") -> list[tuple[str, Sequence[list[int]]]]:
    """Returns the pages that each request is given in a step, by group: all of its pages if it starts or resumes."""
    cached = output.scheduled_cached_reqs
    given: list[tuple[str, Sequence[list[int]]]] = []
    given += [(name, pages) for name, pages in zip(cached.req_ids, cached.new_block_ids, strict=True) if pages]
    given += [(new.req_id, new.block_ids) for new in output.scheduled_new_reqs]
    return given


class SchedulerSide:
    """State machine of the scheduler's connector. Calls come from one thread.

    A request's hit goes through: claim -> hit (settled, reported to the scheduler) -> load (sent to the workers) ->
    reported by all ranks, which drops the claim's leases. If the request ends at any point before, the leases are
    dropped immediately, but never while a worker may still copy.
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
        drafts: Drafts | None = None,
        adapters: Adapters | None = None,
        spans: "SchedulerSpans | None" = None,
        has_siblings: bool = False,
    ) -> None:
        """``has_siblings``: other connectors of this engine load blocks, too."""
        self._depot = depot
        self._options = options
        self._has_siblings = has_siblings
        self._geometry = geometry
        # Overlapping loads with the computation requires loads that the step waits for. With several groups vLLM cannot
        # recompute after such a load fails, so those load before they are scheduled (P2).
        self.loads_before_forward = options.loads_in_steps and geometry.recomputes_by_block
        self._loads, self._dumps = loads, dumps
        self.stats = DepotStats()
        self._spans = spans
        drafts = drafts or Drafts()
        dropped_tokens = geometry.hit_tokens if drafts else 0
        leaves_token = self.loads_before_forward or geometry.windowed
        self._limits = HitLimits(geometry, leaves_token, options.hit_ratio, dropped_tokens)
        self._adapters = adapters or Adapters()
        self._asks = Asks(options.tiers, self.stats)
        self._requests: dict[str, RequestState] = {}
        self._running_loads: UntilAllRanks[LeasedLoad] = UntilAllRanks(ranks)
        self._shared_loads = SharedLoads()
        self._saves = SavePlan(geometry, options.persist_token_threshold, drafts, self.stats)
        self._step = StepMetadata()
        self._load_ids = 0
        self._idle = IdleTime()
        self._turns = Turns()
        self._rates = Rates()
        self._witnesses = Witnesses(ranks)
        self._adapted: UntilAllRanks[bool] = UntilAllRanks(ranks)
        self._taint = Taint()
        self._waited = False
        self.kv_cache_manager: Any = None
        self._namespaces = EngineNamespaces(
            depot,
            geometry,
            ranks,
            drop_at_reset=options.drop_at_reset,
            claimed_more_tokens=dropped_tokens,
            shares_a_tier=options.may_share_a_tier,
            closed=self._forget,
        )
        if not (loads and dumps):
            logger.info("kvdepot: kv_role: this engine only %s blocks", "loads" if loads else "stores")
        if geometry.unsupported:
            self._namespaces.turn_off(geometry.unsupported)

    def open_namespaces(self, ranks: list[RankNamespaces]) -> None:
        """Takes the namespaces that the workers found. Before this call nothing is looked up, loaded or saved."""
        self._namespaces.begin(ranks)

    @property
    def namespace_groups(self) -> Sequence["Group"]:
        """The namespaces in use now, another list whenever they change; empty while there are none."""
        return self._namespaces.groups

    # Lookup.

    def new_request(self, request: "Request") -> None:
        """``on_new_request``."""
        self._state_of(request)

    def _state_of(self, request: "Request") -> RequestState:
        state = self._requests.get(request.request_id)
        if state is not None and not state.is_of(request):
            # An earlier request's name, whose end was not told: what was asked for that one says nothing of this one.
            state.drop_lookup()
            state = None
        if state is None:
            state = self._requests[request.request_id] = RequestState(request)
            lora = getattr(request, "lora_request", None)
            if lora is not None:
                state.adapter, state.inquiry = None, self._adapters.ask(lora)
                state.adapter_use = AdapterUse(lora.lora_name, lora.lora_path, lora.lora_int_id, files=b"")
                state.follow_inquiry()
            state.ask = self._asks.read(getattr(request, "kv_transfer_params", None))
            if self._spans is not None:
                state.trace = self._spans.request(request)
        return state

    def match(self, request: "Request", local_tokens: int) -> tuple[int | None, bool]:
        """``get_num_new_matched_tokens``: returns the depot's tokens beyond ``local_tokens``; None = not yet known."""
        state = self._state_of(request)
        state.local_tokens = local_tokens
        state.tier_tokens = state.loaded_tokens = 0
        state.ran = False
        if self._spans is not None:
            self._spans.asked(state.trace)
        refusal = self._refusal(state)
        # `MultiConnector` waits for all of its connectors before it uses the hit of any.
        waits_for_ranks = refusal != "remote" and self._namespaces.wait_for_ranks()
        if waits_for_ranks or self._namespaces.wait_for_weights(not refusal):
            self._waited = True
            return None, False
        now_s = time.monotonic()
        if self._waits_for_adapter(state, now_s):
            return None, False
        # Asked first, so that requests that wait cost no call of the depot.
        if self._still_shares(state, now_s) or not self._follow_local_hit(state, local_tokens):
            return None, False
        answer = self._look_up(state, local_tokens, now_s)
        if isinstance(answer, Pending):
            return None, False
        hash_tokens = self._geometry.hash_tokens
        if isinstance(answer, Hit) and self._begins_to_share(
            state, (local_tokens + answer.tokens) // hash_tokens, now_s
        ):
            self._turns.claim_is_pending()
            return None, False
        if self._spans is not None:
            asked_tokens = state.asked_tokens if state.lookup is not None else 0
            self._spans.answered(state.trace, answer, local_tokens, asked_tokens)
        if isinstance(answer, Hit):
            state.miss = None
            return answer.tokens, not self.loads_before_forward
        state.miss = answer
        state.drop_lookup()
        state.waits_since_s = None
        return 0, False

    def _waits_for_adapter(self, state: RequestState, now_s: float) -> bool:
        """Returns whether a request is not scheduled yet, because its keys depend on files that are being read."""
        if state.inquiry is None:
            return False
        state.follow_inquiry()
        if state.inquiry is None or self._namespaces.why_closed() or self._refusal(state) != "adapter":
            return False
        if now_s - state.inquiry.begun_s > ADAPTER_S:
            return False
        state.inquiry.wait(self._idle.take_ms() / 1e3)
        state.follow_inquiry()
        return state.inquiry is not None

    def _follow_local_hit(self, state: RequestState, local_tokens: int) -> bool:
        """Adapts a lookup to what vLLM has itself by now. Returns false if that has to wait for another step.

        Requests with one prefix wait together, and the first that is admitted changes the local hit of all others.
        """
        lookup = state.lookup
        if lookup is None or lookup.local_tokens == local_tokens:
            return True
        grown = local_tokens - lookup.local_tokens
        if lookup.begin_after(local_tokens):
            state.asked_tokens = max(0, state.asked_tokens - grown)
            return True
        if not self._turns.may_release():
            return False
        # The wait for a tier goes on; the wait for admission, after the hit was known, was none.
        state.waits_since_s = lookup.started_s if lookup.hit is None else None
        state.drop_lookup()
        return True

    def _look_up(self, state: RequestState, local_tokens: int, now_s: float) -> Pending | Miss | Hit:
        if refusal := self._refusal(state) or self._namespaces.why_closed():
            return Miss(refusal)
        if state.missed_tokens == local_tokens and now_s - state.missed_s < MISS_RECHECK_S:
            return state.miss or Miss("unknown")
        if state.lookup is None:
            begun = self._claim(state, local_tokens, now_s)
            if not isinstance(begun, Lookup):
                return begun
            state.lookup = begun
            if self._spans is not None:
                begun.claim_spans = self._spans.claims(state.trace)
        known = state.lookup.hit is not None  # then the request waits for admission
        answer = self._poll(state.lookup, now_s)
        if not known and not isinstance(answer, Pending):
            self.stats.observe("lookup_seconds", time.monotonic() - state.lookup.started_s)
            given = answer.tokens if isinstance(answer, Hit) else 0
            self.stats.observe("lookup_hit_ratio", given / max(state.asked_tokens, 1))
            if answer.declined_tokens:
                state.expected_tokens = given + answer.declined_tokens
        if isinstance(answer, Miss):
            state.missed_tokens, state.missed_s = local_tokens, now_s
            if not self._depot.attached:
                return Miss("no_depot")
        return answer

    def _still_shares(self, state: RequestState, now_s: float) -> bool:
        """Returns whether a request goes on waiting for another one's load. Counts what it has got when it does not."""
        share = state.share
        if share is None or share.is_over:
            return False
        got = state.local_tokens - share.local_tokens
        if got == 0 and share.load_id in self._shared_loads and now_s - share.since_s < WAIT_S_MAX:
            return True
        self.stats.add("shared_load_tokens", max(0, got))
        state.share = share._replace(is_over=True)
        return False

    def _begins_to_share(self, state: RequestState, end: int, now_s: float) -> bool:
        """Returns whether a request begins to wait for what another one's load brings into vLLM's own cache.

        Loads that a step waits for are cached at once. ``end`` is the unit after the last one of its hit, or at first
        of what it will claim.
        """
        if self.loads_before_forward or not self._options.shares_prefixes or state.share is not None:
            return False
        if state.ask.tiers is not None:
            # Another request may be loaded from a tier that this one excludes.
            return False
        begin, own_end = state.local_tokens // self._geometry.hash_tokens, self._own_end(state.request.num_tokens)
        windowed = self._geometry.windowed
        load_id = self._shared_loads.find(state.hashes, begin, end, own_end, all_of_it=windowed)
        if load_id is None:
            return False
        state.share = Wait(load_id, now_s, state.local_tokens)
        return True

    def _own_end(self, tokens: int) -> int:
        """Returns the unit after the last one that vLLM finds in its own cache for so many tokens."""
        return self._geometry.aligned(tokens - 1) // self._geometry.hash_tokens

    def _poll(self, lookup: Lookup, now_s: float) -> Pending | Miss | Hit:
        """Polls a claim, if this step may: always a new one and one that has settled, the others in turn."""
        last_step, lookup.polled_step = lookup.polled_step, self._turns.step
        if last_step is None:
            answer = lookup.poll(now_s, self._idle)
            if isinstance(answer, Pending):
                self._turns.claim_is_pending()
            return answer
        if lookup.hit is None and not self._turns.may_poll(last_step):
            lookup.polled_step = last_step
            return PENDING
        return lookup.poll(now_s, self._idle)

    def _claim(self, state: RequestState, local_tokens: int, now_s: float) -> Lookup | Pending | Miss:
        """Claims the blocks that the engine does not have, if there are any."""
        bounds = self._limits.bounds(state.request, local_tokens, state.ask.load_tokens_max)
        if isinstance(bounds, Miss):
            return bounds
        if self._begins_to_share(state, bounds.limit - bounds.dropped, now_s):
            return PENDING
        if not self._turns.may_claim():
            return PENDING
        self.stats.add("claims")
        state.asked_tokens = (bounds.limit - bounds.skip) * self._geometry.hash_tokens
        self.stats.add("asked_tokens", state.asked_tokens)
        claim = self._open_claim(state, bounds)
        chooses = state.ask.tiers is not None
        nothing = "excluded" if chooses else "unknown"
        if state.ask.tiers == ():
            patience = Patience(0, begins_early=False, over=nothing, nothing=nothing)
        elif state.expected_tokens:
            # The request has already waited for them as long as that paid off.
            patience = Patience(0, begins_early=False, over="slower", nothing=nothing)
        else:
            # A load looks for a block that does not arrive in every tier.
            early = self.loads_before_forward and self._options.waits_for_all and not chooses
            faster = self._options.waits_while_faster
            patience = Patience(self._options.wait_ms, early, while_faster=faster, nothing=nothing)
        since_s = now_s if state.waits_since_s is None else state.waits_since_s
        return Lookup(claim, local_tokens, bounds, self._geometry, patience, since_s, self._rates)

    def _open_claim(self, state: RequestState, bounds: Bounds) -> kvdepot.Claim:
        groups, hashes, label = self._namespaces.groups, state.hashes[: bounds.limit], state.request.request_id

        def claim() -> kvdepot.Claim:
            tiers = state.ask.tiers
            return self._depot.claim(groups, hashes, skip=bounds.skip, limit=bounds.limit, tiers=tiers, label=label)

        try:
            return claim()
        except kvdepot.ConfigError as error:
            if not state.ask.tiers:
                raise
            # The depot was started with another pipeline.
            state.ask = self._asks.without_tiers(state.ask, error)
            return claim()

    def _refusal(self, state: RequestState) -> str:
        """Returns why the request is computed regardless of the depot, as a key of ``MISSES``; empty if it is not."""
        request = state.request
        if self._namespaces.off:
            return "off"
        if self._has_siblings and is_prefilled_remotely(getattr(request, "kv_transfer_params", None)):
            return "remote"
        if not self._loads:
            return "role"
        if state.load_failed:
            return "failed"
        if getattr(request, "skip_reading_prefix_cache", False) or state.ask.load_tokens_max == 0:
            return "asked"
        if request.num_prompt_tokens < self._options.persist_token_threshold:
            return "short"
        return "adapter" if state.adapter is None else ""

    # Loads.

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        """``update_state_after_alloc``: the request has pages; a hit, if one was used, becomes a load."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        lookup, state.lookup = state.lookup, None
        state.waits_since_s = state.share = None
        self._log_once(state, external_tokens, lookup)
        page_ids = blocks.get_block_ids()
        # Another connector may load into these pages before a step computes on them, so pending dumps must have read
        # them.
        for group in () if state.ran else self._geometry.groups:  # nobody loads for a session that goes on
            pages = page_ids[group.index][state.local_tokens // group.block_tokens :]
            self._step.fresh_pages += [page for page in pages if page]
        if external_tokens <= 0 or lookup is None:
            if lookup is not None:
                lookup.release()
            return
        end_tokens = lookup.local_tokens + external_tokens
        plan, unproven = planned_blocks(self._geometry, state.hashes, page_ids, lookup.local_tokens, end_tokens)
        state.tier_tokens = min(external_tokens, lookup.hit.tier_tokens if lookup.hit is not None else 0)
        state.loaded_tokens = external_tokens
        load_id = self._next_load_id()
        before_forward = self.loads_before_forward
        load = Load(load_id, request.request_id, before_forward, plan)
        leased = LeasedLoad(
            request.request_id, lookup.claim, before_forward, unproven, from_tier=bool(state.tier_tokens)
        )
        if self._spans is not None:
            leased.claim_spans = lookup.claim_spans
            leased.span = self._spans.load_begun(state.trace, load, external_tokens, state.tier_tokens)
        self._running_loads.begin(load_id, leased)
        unit = self._geometry.hash_tokens
        # With windows or states vLLM may keep only what the end of a prompt needs.
        if not before_forward and (
            not self._geometry.windowed or end_tokens // unit == self._own_end(request.num_prompt_tokens)
        ):
            self._shared_loads.begin(load_id, state.hashes, lookup.local_tokens // unit, end_tokens // unit)
        self._step.loads.append(load)
        self.stats.add_hit(external_tokens, state.tier_tokens)

    def _next_load_id(self) -> int:
        self._load_ids += 1
        return self._load_ids

    def _log_once(self, state: RequestState, external_tokens: int, lookup: Lookup | None) -> None:
        """Logs what a request was given at its first admission; if that is nothing, logs and counts why."""
        if state.logged:
            return
        state.logged = True
        self.stats.add("declined_tokens", max(0, state.expected_tokens - max(0, external_tokens)))
        request, unit = state.request, self._geometry.hit_tokens
        hit_blocks = max(0, external_tokens) // unit
        log_hit(request.request_id, request.num_tokens // unit, state.local_tokens // unit, hit_blocks)
        miss = state.miss or (Miss("not_taken") if lookup is not None else None)
        if not hit_blocks and miss is not None:
            self._count_miss(state, miss)

    def _count_miss(self, state: RequestState, miss: Miss) -> None:
        """Counts a request as a miss, and logs why; once, whatever becomes of it."""
        if state.miss_counted:
            return
        state.miss_counted = True
        self.stats.add("misses", label=miss.reason)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "request_id: %s, nothing from the depot%s: %s",
                state.request.request_id,
                self._where(state, miss),
                MISSES[miss.reason],
            )

    def _where(self, state: RequestState, miss: Miss) -> str:
        """The first block that was missed, for people and for ``kvdepot why``; empty where the depot was not asked."""
        last = (
            0
            if miss.block is None
            else (miss.block + 1) * (self._geometry.hit_tokens // self._geometry.hash_tokens) - 1
        )
        if miss.block is None or last >= len(state.hashes):
            return ""
        return f" (block {miss.block}, hash {kvdepot.block_hash(state.hashes[last]).hex()})"

    def hit_tier_tokens(self, request: "Request") -> int:
        """Returns how many tokens of the request's last hit came from below the pool."""
        state = self._requests.get(request.request_id)
        return state.tier_tokens if state is not None else 0

    # The step.

    def build_step(self, output: "SchedulerOutput") -> StepMetadata:
        """``build_connector_meta``: returns everything that the workers have to do in this step."""
        step, self._step = self._step, StepMetadata()
        step.computes = bool(output.num_scheduled_tokens)
        self._idle.begin_step(output.total_num_scheduled_tokens == 0)
        self._turns.next_step()
        self._shared_loads.step_planned()
        step.decoding = any(
            output.num_scheduled_tokens[name] <= DECODE_TOKENS_MAX for name in output.scheduled_cached_reqs.req_ids
        )
        unproven = {load_id: load for load_id, load in self._running_loads.items() if load.before_forward}
        self._follow(list(unproven.values()), output)
        weights = self._namespaces.weights
        step.generation, step.version = weights.generation, weights.version
        # Not in a step that only finishes requests: an engine that is paused for an update still has the old weights.
        step.examine = weights.examining and (self._waited or not self._idle.idle)
        self._waited = False
        step.timed = self._rates.step_began(
            output.total_num_scheduled_tokens,
            sum(tokens for tokens in output.num_scheduled_tokens.values() if tokens <= DECODE_TOKENS_MAX),
            time.monotonic(),
            waits=any(load.before_forward for load in step.loads),
        )
        # Needed even without a namespace: dumps of an earlier step may still read these pages.
        self._add_fresh_pages(step, output)
        self._saves.follow(output, self._requests)
        step.adapters = self._adapters_of(output)
        if not self._namespaces.groups:
            if self._namespaces.misses_ranks():
                self._namespaces.step_without_ranks()
            return step
        # Workers take late saves before they write to the step's pages, unless vLLM clears these even earlier.
        fresh = set(step.fresh_pages)
        if self._options.step_order.clears_first:
            self._saves.overwritten(fresh)
        step.late_saves = self._saves.released()
        self._saves.overwritten(fresh)
        adapted, foreign = self._saves.complete(output, self._trusted()) if self._dumps else ({}, {})
        saves = adapted.pop(None, {})
        if foreign:
            step.witness = self._next_load_id()
            self._witnesses.begin(step.witness, self._sharers(foreign, output))
        # With steps in flight, loads of an earlier step may not have been reported yet, so they count, too.
        doubtful = set(unproven) | self._witnesses.planned(output.num_scheduled_tokens)
        if doubtful:
            self._saves.hold(saves, doubtful)
        else:
            step.saves = saves
        if any(adapted.values()):
            # Which files the workers compute with is known only afterwards: a replacement in place needs no step.
            step.adapted = self._next_load_id()
            self._adapted.begin(step.adapted, True)
            for adapter, blocks in adapted.items():
                self._saves.hold(blocks, doubtful | {step.adapted}, adapter)
        return step

    def _adapters_of(self, output: "SchedulerOutput") -> list[AdapterUse]:
        """Returns the adapters that a step computes with, for the workers to compare with their memory."""
        if not self._adapters.used:
            return []
        uses: dict[AdapterUse, None] = {}
        for name in output.num_scheduled_tokens:
            state = self._requests.get(name)
            if state is not None:
                state.follow_inquiry()
                if state.adapter_use is not None:
                    uses[state.adapter_use] = None
        return list(uses)

    def _sharers(self, foreign: Mapping[str, int], output: "SchedulerOutput") -> set[str]:
        """Returns the requests that use pages which another connector loads for others of the step.

        ``foreign``: tokens before that load, by request.
        """
        given = given_pages(output)
        tables = dict(given)
        sharers: set[str] = set()
        for owner, tokens in foreign.items():
            dependent: set[int] = set()
            for group in self._geometry.groups if owner in tables else ():
                dependent.update(page for page in tables[owner][group.index][tokens // group.block_tokens :] if page)
            for name, page_ids in given:
                for pages in page_ids if name != owner else ():
                    first = next((i for i, page in enumerate(pages) if page in dependent), None)
                    if first is not None:
                        sharers.add(name)
                        dependent.update(page for page in pages[first:] if page)
        return sharers

    def _trusted(self) -> Mapping[str, RequestState]:
        if not self._taint:
            return self._requests
        return {name: state for name, state in self._requests.items() if name not in self._taint}

    def _follow(self, loads: Sequence[LeasedLoad], output: "SchedulerOutput") -> None:
        """Tracks what this step computes on loads that are unreported or failed, in the order of scheduling."""
        for load in loads:
            load.steps += 1
        if not loads and not self._taint:
            return
        for request_id, page_ids in given_pages(output):
            for pages in page_ids:
                self._taint.follow(request_id, pages)
                for load in loads:
                    load.follow(request_id, pages)
        if self._taint:
            self._evict(self._taint.pages)

    def _add_fresh_pages(self, step: StepMetadata, output: "SchedulerOutput") -> None:
        for new in output.scheduled_new_reqs:
            state = self._requests.get(new.req_id)
            for group in self._geometry.groups:
                # The leading blocks are read, not written: vLLM's own prefix cache has them, or a session that goes on.
                # vLLM may have discarded a part of its own hit when it admitted the request.
                own_tokens = 0
                if state is not None:
                    own_tokens = new.num_computed_tokens
                    if not state.ran:
                        own_tokens = min(state.local_tokens, own_tokens)
                own = own_tokens // group.block_tokens
                step.fresh_pages += [page for page in new.block_ids[group.index][own:] if page]
        for page_ids in output.scheduled_cached_reqs.new_block_ids:
            for pages in page_ids or ():
                step.fresh_pages += [page for page in pages if page]
        for copy in getattr(output, "kv_cache_block_copies", None) or ():
            step.fresh_pages.append(copy.dst_block_id)
        step.fresh_pages = list(dict.fromkeys(step.fresh_pages))

    def reported(self, report: LoadReport | None, *, invalid_pages: bool = False) -> None:
        """``update_connector_output``: takes what ranks found, and loads that ended on some or all of them.

        ``invalid_pages``: a connector failed to load a page that the step computed on.
        """
        if invalid_pages:
            self._another_failed()
        if report is None:
            return
        if report.timed:
            self._rates.step_ended(report.timed, time.monotonic())
        if report.broken:
            self._namespaces.turn_off(report.broken)
        self._namespaces.found(report.ranks)
        if report.moved is not None:
            self._namespaces.moved(report.moved, unused=report.moved_unused)
        self._namespaces.answered(report.generation, report.weights)
        for load_id in report.failed:
            self._load_failed(load_id)
        for adapter in report.changed_adapters:
            self._adapter_changed(adapter)
        for load_id, ranks in report.done.items():
            if (
                self._adapted.reported(load_id, ranks)
                or self._witnesses.reported(load_id, ranks)
                or self._load_ended(load_id, ranks)
            ):
                self._saves.load_was_good(load_id)

    def _adapter_changed(self, adapter: AdapterName) -> None:
        """Gives up requests with an adapter of which a worker's memory may have, or have had, another version (P1).

        vLLM's own cache may have KV of both under the hashes of this name and path, so later requests are given up too.
        """
        why = "a worker has computed with files that may be others than its keys stand for: give a changed adapter"
        self._adapters.distrust(adapter, f"{why} another path, or restart the engine")
        self._saves.adapter_changed(adapter)
        for state in self._requests.values():
            if state.adapter_name == adapter:
                state.adapter = state.inquiry = None
                state.drop_lookup()

    def _load_failed(self, load_id: int) -> None:
        load = self._running_loads.get(load_id)
        self._saves.load_failed(load_id)
        self._shared_loads.forget(load_id)
        if load is None:
            return
        if self._spans is not None:
            self._spans.load_ended(load.span, "incomplete")
            load.span = None
        if load.before_forward:
            self._evict(load.pages)
            # vLLM makes this request compute the failed blocks again, and lets requests that share them go on as if
            # these were valid. It is not to be trusted itself if a step was planned meanwhile.
            self._distrust(load.readers if load.steps > 1 else load.readers - {load.request_id})
        state = self._requests.get(load.request_id)
        if state is not None:
            state.load_failed = True
            state.saved_blocks = {}
            self._count_miss(state, Miss("failed"))

    def _distrust(self, request_ids: Iterable[str]) -> None:
        """Marks requests that compute on garbage which vLLM considers valid."""
        for request_id in request_ids:
            if request_id in self._requests:
                held = getattr(self.kv_cache_manager, "get_block_ids", None)
                pages = held(request_id) if held is not None else ()
                self._taint.add(request_id, (page for group in pages for page in group))
        if self._taint:
            self._evict(self._taint.pages)

    def _load_ended(self, load_id: int, ranks: int) -> bool:
        """Counts ``ranks`` more ranks that have ended a load. Returns whether all have."""
        load = self._running_loads.reported(load_id, ranks)
        if load is not None:
            self._shared_loads.ended(load_id)
            for read in load.release():
                self.stats.add("tier_blocks", read.blocks, read.tier)
            if self._spans is not None:
                self._spans.load_ended(load.span)
        return load is not None

    def _another_failed(self) -> None:
        """Drops saves that may have computed on a failed load. vLLM recomputes the requests, which are saved then."""
        numbers, request_ids, later_ids = self._witnesses.failed()
        for number in numbers:
            self._saves.load_failed(number)
        for request_id in request_ids & self._requests.keys():
            self._requests[request_id].saved_blocks = {}
        self._distrust(later_ids)

    def _forget(self) -> None:
        """Stops lookups, loads and saves. Loads in flight keep their leases until they are reported."""
        self._saves.clear()
        for state in self._requests.values():
            state.drop_lookup()
            # They may start again before there are namespaces again, which will not contain the blocks stored so far.
            state.saved_blocks = {}

    def _evict(self, pages: AbstractSet[int]) -> None:
        """Removes what a failed load left, and what was computed on it, from vLLM's prefix cache.

        vLLM publishes blocks of a load that a step waits for before it is done. It leaves them there while they are
        recomputed, and forever if the request was aborted meanwhile: another request that hits them would compute on
        garbage, and we would store it (P1). A page that another request has by now costs a cached block.
        """
        evict = getattr(self.kv_cache_manager, "evict_blocks", None)
        if evict is not None:
            evict(pages)

    def has_late_saves(self) -> bool:
        """Returns whether the engine has to run one more step even if no request is left."""
        return self._saves.waiting()

    def finished(self, request_id: str) -> None:
        """``request_finished``: loads of the request in flight keep their leases until all ranks have reported."""
        self._taint.ended(request_id)
        for load_id, load in self._running_loads.items():
            if load.request_id == request_id:
                self._shared_loads.forget(load_id)  # vLLM frees its pages without caching them
        state = self._requests.pop(request_id, None)
        if state is not None:
            if self._spans is not None:
                self._spans.finished(state.trace)
            state.drop_lookup()

    def reset(self) -> bool:
        """``reset_cache``: see ``EngineNamespaces.reset``. Works without a depot."""
        self._namespaces.reset(own_cache_left=not self._own_cache_is_empty())
        return True

    def _own_cache_is_empty(self) -> bool:
        """Returns whether vLLM's own cache was reset as well: it keeps everything while any request has blocks."""
        pool = getattr(self.kv_cache_manager, "block_pool", None)
        if pool is None:
            return not self._requests
        return bool(pool.num_gpu_blocks - pool.get_num_free_blocks() <= 1)  # the null block is never free

    def close(self) -> None:
        """``shutdown``."""
        for state in self._requests.values():
            state.drop_lookup()
        for load in self._running_loads.all():
            load.release()
            if self._spans is not None:
                self._spans.load_ended(load.span, "shutdown")
        self._depot.close()
