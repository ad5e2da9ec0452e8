"""The namespaces that an engine's blocks are looked up and stored in, as its scheduler sees them.

There are none until all ranks have reported theirs, none while the weights are in doubt (``versions``), and none for
good if a rank cannot take part.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvdepot import Group
from kvdepot.engines.vllm.drops import Drops
from kvdepot.engines.vllm.facts import canonical_of_version
from kvdepot.engines.vllm.groups import Geometry
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.meta import RankNamespaces
from kvdepot.engines.vllm.nodes import problem_of_nodes
from kvdepot.engines.vllm.versions import WeightsVersion
from kvdepot.errors import KVDepotError

if TYPE_CHECKING:
    from kvdepot import Depot, Namespace

logger = connector_logger()

RANK_STEPS_MAX = 32
"""Steps after which requests no longer wait for the ranks' reports, which should come with the first step."""

EXAMINE_S = 30.0
"""Seconds that a request waits for the workers' digests of the weights after a reset; after that it is computed."""

STALE = "the weights have changed, and vLLM's own cache still has KV of the earlier ones"


class EngineNamespaces:
    """State machine: reported by the ranks -> open -> in doubt after a reset -> open again, perhaps as another version.

    Attributes:
        groups: groups of a claim; empty = nothing is looked up, loaded or saved.
        off: why the engine runs without the depot for good; empty if it does not.
        weights: version of the weights that the engine computes with.
    """

    def __init__(
        self,
        depot: "Depot",
        geometry: Geometry,
        ranks: int,
        *,
        drop_at_reset: bool,
        claimed_more_tokens: int,
        shares_a_tier: bool,
        closed: Callable[[], None],
    ) -> None:
        """Starts without a namespace.

        Args:
            depot: opens and resets them.
            geometry: groups that have one.
            ranks: number of ranks that report.
            drop_at_reset: whether a reset also drops what is stored for every engine.
            claimed_more_tokens: tokens by which claims are longer than their hits, see ``drafts``.
            shares_a_tier: whether depots of several nodes may find each other's blocks.
            closed: called when there are no namespaces any more.
        """
        self._depot = depot
        self._geometry = geometry
        self._ranks = ranks
        self._drop_at_reset = drop_at_reset
        self._claimed_more_tokens = claimed_more_tokens
        self._shares_a_tier = shares_a_tier
        self._closed = closed
        self._found: list[RankNamespaces] = []
        self._names: list[list[str]] = []
        self._steps_without_ranks = 0
        self._own_cache_left = self._own_cache_stale = False
        self._examined_since_s = 0.0
        self._drops = Drops(depot)
        self.groups: list[Group] = []
        self._opened: list[Namespace] = []
        self.off = ""
        self.weights = WeightsVersion(ranks)

    # What the ranks found.

    def found(self, ranks: list[RankNamespaces]) -> None:
        """Takes the reports of some ranks, each of which reports once."""
        self._found += ranks
        if ranks and len(self._found) == self._ranks:
            self.begin(self._found)

    def begin(self, ranks: list[RankNamespaces]) -> None:
        """Takes the reports of all ranks."""
        if self.off:
            return
        if broken := next((rank.broken for rank in ranks if rank.broken), ""):
            self.turn_off(broken)
            return
        if apart := problem_of_nodes((rank.node for rank in ranks), shares_a_tier=self._shares_a_tier):
            self.turn_off(apart)
            return
        digests = {rank.rank: rank.weights for rank in ranks}
        if unknown := self.weights.begin(digests, all(rank.named for rank in ranks)):
            self.turn_off(unknown)
            return
        # Ranks with equal bytes (MLA) name one namespace, a rank with several slices of KV heads one for each; a
        # pipeline stage without such layers names none.
        self._names = [
            list(dict.fromkeys(name for rank in ranks for name in rank.canonical.get(group.index, ())))
            for group in self._geometry.groups
        ]
        if not self.weights.examining:
            self._open_version()

    def wait_for_ranks(self) -> bool:
        """Returns whether to wait for ranks that have not reported; they report at the end of the first step."""
        return not self.off and self.misses_ranks() and self._steps_without_ranks < RANK_STEPS_MAX

    def misses_ranks(self) -> bool:
        """Returns whether some rank has not reported, no matter how long ago it should have."""
        return not self._names and len(self._found) < self._ranks

    def step_without_ranks(self) -> None:
        """Notes that a step was planned before all ranks have reported."""
        self._steps_without_ranks += 1
        if self._steps_without_ranks == RANK_STEPS_MAX and not self.off:
            logger.warning(
                "kvdepot: only %d of %d ranks have reported their namespaces; nothing is looked up until all have",
                len(self._found),
                self._ranks,
            )

    def turn_off(self, why: str) -> None:
        """Disables the connector on all ranks, because one cannot take part. Logged once."""
        if self.off:
            return
        logger.error("kvdepot is off; vLLM runs without it: %s", why)
        self.off = why
        self.weights.doubt(examine=False)
        self._close()

    def why_closed(self) -> str:
        """Returns why nothing is looked up now, as a key of ``lookup.MISSES``; empty if lookups work."""
        if self.groups:
            return ""
        if self.off:
            return "off"
        return "ranks" if self.misses_ranks() else "weights"

    def _open_version(self) -> None:
        version = self.weights.version or ""
        try:
            ranks = [
                [self._depot.open_namespace(canonical_of_version(name, version)) for name in names]
                for names in self._names
            ]
        except KVDepotError as error:
            self.turn_off(f"its namespaces cannot be opened: {error}")
            return
        self.groups = [
            Group(
                namespaces,
                group.window_blocks + (self._claimed_more_tokens // group.block_tokens if group.window_blocks else 0),
                group.hashes_per_block,
            )
            for group, namespaces in zip(self._geometry.groups, ranks, strict=True)
        ]
        earlier, self._opened = self._opened, [namespace for namespaces in ranks for namespace in namespaces]
        if self._drops.when_opened:
            self._drops.when_opened = False
            self._drops.ask(self._all())
            self.groups = []
            self._drop()
            return
        for namespace in earlier:
            namespace.close()
        ids = [namespace.id for namespace in self._opened]
        logger.info("kvdepot: %d ranks, namespaces %s", self._ranks, ", ".join(ids))

    def _all(self) -> list["Namespace"]:
        return self._opened if self.groups else []

    def _close(self) -> None:
        self.groups = []
        self._closed()

    # Weights that change in place.

    def reset(self, own_cache_left: bool) -> None:
        """``reset_cache``: stops serving KV of weights other than those that the workers have now (P1).

        vLLM calls it after a change of weights and, without one, before it sleeps and when it pauses. The workers are
        asked which it was, and until they have answered nothing is looked up, loaded or saved. That needs no depot.

        Args:
            own_cache_left: vLLM could not reset its own cache, which it keeps completely while a request has blocks.
        """
        if self.off:
            return
        if self._drop_at_reset and not self._names:
            self._drops.when_opened = True
        elif self._drop_at_reset:
            self._drops.ask(self._all())
            self._drop()
        self._own_cache_left = own_cache_left
        self._own_cache_stale = self._own_cache_stale and own_cache_left
        self._examined_since_s = 0.0
        self.weights.doubt(examine=True)
        self._close()

    def wait_for_weights(self, wants_loads: bool) -> bool:
        """Returns whether a request is not scheduled yet, because its hit depends on the workers' answer."""
        if self._drops.due:
            self._drop()
        if not self.weights.examining or not wants_loads:
            return False
        now = time.monotonic()
        self._examined_since_s = self._examined_since_s or now
        return now - self._examined_since_s <= EXAMINE_S

    def answered(self, generation: int, digests: dict[int, str]) -> None:
        """Takes digests of the weights from ranks. When all have answered, opens the namespaces of those weights."""
        if not digests or not self.weights.answered(generation, digests):
            return
        changed = self.weights.settled()
        if self.off:
            return
        self._own_cache_stale = self._own_cache_stale or (changed and self._own_cache_left)
        if self._own_cache_stale:
            # vLLM could not reset its own cache, because requests were running, and others will compute on it.
            logger.error("kvdepot is off until the next reset_prefix_cache(reset_connector=True): %s", STALE)
            self.weights.doubt(examine=False)
            return
        logger.info("kvdepot: the weights %s", "have changed" if changed else "are the same, what is stored stays")
        if not self._drops.due:
            self._open_version()

    def moved(self, generation: int, *, unused: bool) -> None:
        """Handles a rank's unannounced change of weights within this generation.

        ``unused``: the earlier weights have computed nothing, so the workers are asked as after a reset.
        """
        if self.off or generation != self.weights.generation or self.weights.version is None:
            return
        if unused:
            logger.info("kvdepot: the weights were updated before the first request")
            self._examined_since_s = 0.0
            self.weights.doubt(examine=True)
            self._close()
            return
        logger.error("kvdepot is off until the next reset_prefix_cache(reset_connector=True): %s", STALE)
        self.weights.doubt(examine=False)
        self._own_cache_stale = True
        self._close()

    def _drop(self) -> None:
        if self._drops.confirmed() and self.weights.version is not None and not self.groups:
            self._open_version()
