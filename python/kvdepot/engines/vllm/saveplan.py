"""Which blocks a step saves, and which of them have to wait for proof that the step's loads succeeded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.engines.vllm.drafts import Drafts
from kvdepot.engines.vllm.groups import Geometry
from kvdepot.engines.vllm.meta import AdapterName, Blocks, GroupBlocks
from kvdepot.engines.vllm.releases.block_tables import BlockTables
from kvdepot.engines.vllm.requests import RequestState
from kvdepot.engines.vllm.stats import DepotStats

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def boundary_states(output: "SchedulerOutput", request_id: str) -> Sequence[tuple[int, int, int]]:
    """Returns the states that a request has at block boundaries after the step: group, page and number of tokens."""
    tables = output.kv_connector_block_state
    return () if tables is None else tables.boundary_state_offloads.get(request_id, ())


@dataclass
class HeldSaves:
    """Saves of a step that computed on KV loaded in that same step.

    The step's results are correct only if its loads succeeded on every rank: a failed load on one rank poisons, through
    the layers' collectives, everything that all ranks computed after it. So the saves wait for all ranks' reports, and
    are dropped if a load failed (P1). Those of requests with a LoRA adapter wait in the same way until every rank has
    compared the adapter in its memory.
    """

    load_ids: set[int]
    saves: GroupBlocks
    adapter: AdapterName | None = None


class SavePlan:
    """Saves from the step that completes a block to the step that hands it to the workers, usually the same one."""

    def __init__(self, geometry: Geometry, persist_token_threshold: int, drafts: Drafts, stats: DepotStats) -> None:
        self._geometry = geometry
        self._drafts = drafts
        self._stats = stats
        self._threshold = persist_token_threshold
        self._held: list[HeldSaves] = []
        self._tables = BlockTables()
        self._keeps_states = any(group.keeps_state for group in geometry.groups)

    def follow(self, output: "SchedulerOutput", alive: Mapping[str, RequestState]) -> None:
        """Takes a step's block tables. For every step: vLLM 0.29 tells a table only when it has changed."""
        self._tables.follow(output.kv_connector_block_state, alive)

    def complete(
        self, output: "SchedulerOutput", requests: Mapping[str, RequestState]
    ) -> tuple[dict[AdapterName | None, GroupBlocks], dict[str, int]]:
        """Returns the blocks whose last token this step computes, or that another connector has loaded, by adapter.

        Also returns the requests that start on KV that another connector has loaded, or loads in this step, with the
        number of tokens before that KV.
        """
        saves: dict[AdapterName | None, GroupBlocks] = {}
        foreign: dict[str, int] = {}
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        # Requests that start, or resume after preemption. The KV before their first token is in vLLM's own cache, and
        # so was dumped already, or was loaded, by us or by another connector.
        starting = {new.req_id for new in output.scheduled_new_reqs} | set(cached.resumed_req_ids)
        for request_id, new_tokens in output.num_scheduled_tokens.items():
            state = requests.get(request_id)
            if state is None:
                continue
            before_foreign = self._start(state, computed[request_id]) if request_id in starting else None
            if state.request.num_prompt_tokens < self._threshold:
                continue
            if before_foreign is not None:
                foreign[request_id] = before_foreign
            if state.adapter is None:
                continue
            adapter_saves = saves.setdefault(state.adapter_name, {})
            self._complete_request(state, computed[request_id] + new_tokens, adapter_saves)
            if self._keeps_states:
                self._complete_states(output, state, adapter_saves)
        return {
            adapter: {index: blocks for index, blocks in groups.items() if blocks.pages}
            for adapter, groups in saves.items()
        }, foreign

    def _start(self, state: RequestState, computed_tokens: int) -> int | None:
        """Notes which blocks of a starting request need no dump.

        Returns the number of tokens before the KV that another connector has loaded; ``None`` if none has.
        """
        ran, state.ran = state.ran, True
        known = {group.index: group.block_tokens for group in self._geometry.groups}
        if ran:
            # A session's next input, before which vLLM may have discarded tokens.
            saved = state.saved_blocks.items()
            state.saved_blocks = {index: min(blocks, computed_tokens // known[index]) for index, blocks in saved}
            return None
        ours = min(computed_tokens, state.local_tokens + state.loaded_tokens)
        state.saved_blocks = {index: ours // block_tokens for index, block_tokens in known.items()}
        return ours if computed_tokens > ours else None

    def _complete_request(self, state: RequestState, end_tokens: int, saves: GroupBlocks) -> None:
        hashes = state.hashes
        page_ids: tuple[list[int], ...] | None = None
        for group in self._geometry.groups:
            if group.keeps_state:
                continue
            # Only tokens known before the step have hashes, so a rejected draft is never saved.
            known = len(hashes) // group.hashes_per_block
            end = self._drafts.final_blocks(group, end_tokens, state.request.num_prompt_tokens, known)
            if state.ask.store_tokens_max is not None:
                end = min(end, state.ask.store_tokens_max // group.block_tokens)
            begin = state.saved_blocks.setdefault(group.index, state.local_tokens // group.block_tokens)
            if end <= begin:
                continue
            page_ids = page_ids or self._tables.pages_of(state.request.request_id)
            if page_ids is None:
                return  # they are saved once vLLM has told its pages
            blocks = saves.setdefault(group.index, Blocks())
            if state.trace is not None and state.trace.carrier is not None:
                blocks.traces.append(state.trace.carrier)
            for index in range(begin, end):
                page = page_ids[group.index][index]
                if page != 0:  # the null block: it has left the window
                    blocks.add(hashes[(index + 1) * group.hashes_per_block - 1], page, state.ask.priority)
            state.saved_blocks[group.index] = end

    def _complete_states(self, output: "SchedulerOutput", state: RequestState, saves: GroupBlocks) -> None:
        """Adds the states that this step leaves at the end of a block of the prompt.

        vLLM names their pages: a state moves on to another page with the next token, so the block table does not say
        where it was left. It names every boundary whose state its own prefix cache keeps.
        """
        for group_index, page, end_tokens in boundary_states(output, state.request.request_id):
            group = next((g for g in self._geometry.groups if g.index == group_index and g.keeps_state), None)
            # A boundary within a block belongs to vLLM's partial hits.
            if group is None or page == 0 or end_tokens % group.block_tokens:
                continue
            unit, index = end_tokens // self._geometry.hash_tokens, end_tokens // group.block_tokens - 1
            if unit > len(state.hashes) or end_tokens > state.request.num_prompt_tokens:
                continue
            if state.ask.store_tokens_max is not None and end_tokens > state.ask.store_tokens_max:
                continue
            if index < state.saved_blocks.setdefault(group.index, state.local_tokens // group.block_tokens):
                continue
            blocks = saves.setdefault(group.index, Blocks())
            if state.trace is not None and state.trace.carrier is not None:
                blocks.traces.append(state.trace.carrier)
            blocks.add(state.hashes[unit - 1], page, state.ask.priority)
            state.saved_blocks[group.index] = index + 1

    def hold(self, saves: GroupBlocks, load_ids: set[int], adapter: AdapterName | None = None) -> None:
        """Holds saves back until all ranks have reported the loads that the step may have computed on."""
        if saves:
            self._held.append(HeldSaves(load_ids, saves, adapter))

    def adapter_changed(self, adapter: AdapterName) -> None:
        """Drops what requests with this adapter have computed (P1)."""
        self._drop([held for held in self._held if held.adapter == adapter], "adapter")
        self._held = [held for held in self._held if held.adapter != adapter]

    def overwritten(self, fresh: set[int]) -> None:
        """Drops held blocks whose pages are reused before they could be saved (P1)."""
        for held in self._held:
            for index, blocks in held.saves.items():
                if not fresh.isdisjoint(blocks.pages):
                    kept = [at for at, page in enumerate(blocks.pages) if page not in fresh]
                    held.saves[index] = blocks.at(kept)
                    self._stats.add("dropped_blocks", len(blocks.pages) - len(kept), "overwritten")

    def load_was_good(self, load_id: int) -> None:
        """Notes that all ranks have loaded it completely."""
        for held in self._held:
            held.load_ids.discard(load_id)

    def load_failed(self, load_id: int) -> None:
        """Drops everything that was computed on the load, and all other saves of the same step (P1)."""
        self._drop([held for held in self._held if load_id in held.load_ids], "load_failed")
        self._held = [held for held in self._held if load_id not in held.load_ids]

    def _drop(self, dropped: list[HeldSaves], reason: str) -> None:
        for held in dropped:
            self._stats.add("dropped_blocks", sum(len(blocks.pages) for blocks in held.saves.values()), reason)

    def released(self) -> GroupBlocks:
        """Takes the saves that are now known to build on successful loads."""
        late: GroupBlocks = {}
        while self._held and not self._held[0].load_ids:
            for index, blocks in self._held.pop(0).saves.items():
                late.setdefault(index, Blocks()).extend(blocks)
        return late

    def waiting(self) -> bool:
        """Whether saves are held back."""
        return bool(self._held)

    def clear(self) -> None:
        """Drops all saves that are held back."""
        self._drop(self._held, "turned_off")
        self._held.clear()
