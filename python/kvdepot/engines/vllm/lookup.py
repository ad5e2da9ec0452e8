"""One lookup of a request that waits for admission: how much may be hit, the claim's state, and why it missed.

Nothing here reads a clock or waits: the caller passes the current time, and the time available for waiting.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvdepot.engines.vllm.groups import Geometry
from kvdepot.engines.vllm.rates import Rates

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvdepot import Claim
    from kvdepot.claim import TierReads
    from kvdepot.engines.vllm.request_spans import ClaimSpans

CLAIM_WAIT_MS = 2
"""Milliseconds that an idle engine waits for a claim that is not settled, at a time."""

REST_MS_MAX = 20
"""An idle engine begins a load when the blocks still being read are expected within this many milliseconds."""

MISSES = {
    "unknown": "the depot has no block of it beyond what vLLM has: never stored, evicted, or stored under other facts",
    "excluded": "neither host memory nor a tier that the request allows has it (kv_load_tiers)",
    "late": "the load policy's time was over before a block of it was in host memory, or was known",
    "slower": "a tier has it, and waiting for it would take longer than computing it",
    "no_depot": "no depot answers",
    "ranks": "not all ranks have told what they found",
    "weights": "the weights are in doubt, or stale",
    "off": "the connector is off",
    "role": "the engine only stores, by its kv_role",
    "adapter": "the files of its LoRA adapter are not to be trusted, or could not be read in time",
    "failed": "a load of it has failed, so it is computed",
    "asked": "the request itself asked for it",
    "remote": "another engine has computed it, and another connector loads it",
    "short": "it is too short: under persist_token_threshold, or less than a block may be hit",
    "own_cache": "vLLM itself has all that could be hit",
    "not_taken": "vLLM did not take what was found: another connector's hit came first",
}
"""Reasons why a request was given nothing, by the key that counts them."""


@dataclass(frozen=True)
class Pending:
    """Not known yet: the scheduler asks again at its next step."""


@dataclass(frozen=True)
class Miss:
    """No hit beyond what the engine already has.

    Attributes:
        reason: a key of ``MISSES``.
        declined_tokens: as in a hit.
        block: first block that the depot does not have, counted from the beginning of the prompt; if it was asked.
    """

    reason: str
    block: int | None = None
    declined_tokens: int = 0


@dataclass(frozen=True)
class Hit:
    """A hit of ``tokens`` tokens beyond what the engine already has.

    Attributes:
        tier_tokens: tokens of the hit that come from below the pool.
        declined_tokens: further tokens that a tier has but that are computed, because that is faster.
    """

    tokens: int
    tier_tokens: int
    declined_tokens: int = 0


PENDING = Pending()


class Bounds(NamedTuple):
    """Range of a lookup, in hash units.

    Attributes:
        skip: leading units that the engine already has.
        limit: end of the claim.
        dropped: units at the end of a hit that are claimed to know that they match, but not used.
    """

    skip: int
    limit: int
    dropped: int


class IdleTime:
    """Time that a step of an idle engine gives to unsettled lookups: one wait, for whichever takes it.

    Scheduling again immediately would keep a processor from the threads that fetch the blocks. One request waits on
    behalf of all: another one's claim may settle meanwhile.
    """

    def __init__(self) -> None:
        self.idle = False
        self._wait_ms = 0

    def begin_step(self, idle: bool) -> None:
        """Notes that the scheduler has planned a step, which computes something or is idle."""
        self.idle = idle
        self._wait_ms = CLAIM_WAIT_MS if idle else 0

    def take_ms(self) -> int:
        """Takes the remaining wait of the step, in milliseconds."""
        taken, self._wait_ms = self._wait_ms, 0
        return taken


@dataclass(frozen=True)
class HitLimits:
    """Limits of how much of a request may be hit, whatever the depot has.

    Attributes:
        leaves_token: whether a token has to be left to compute. After a load between steps vLLM takes the last one
            back, but then a window begins one token earlier, where no block was loaded.
        dropped_tokens: tokens that a hit loses at its end, because a draft has to see what follows (``drafts``).
    """

    geometry: Geometry
    leaves_token: bool
    hit_ratio: float | None = None
    dropped_tokens: int = 0

    def bounds(self, request: "Request", local_tokens: int, load_tokens_max: int | None) -> Bounds | Miss:
        """Returns the range to claim for a request of which the engine already has ``local_tokens``."""
        # Limited before the claim, not after: a shorter hit needs other blocks of a window.
        geometry = self.geometry
        known = geometry.aligned(min(request.num_tokens, len(request.block_hashes) * geometry.hash_tokens))
        tokens: int = request.num_tokens - (1 if self.leaves_token else 0)
        if self.hit_ratio is not None:
            tokens = min(tokens, int(self.hit_ratio * request.num_prompt_tokens))
        tokens = min(geometry.aligned(tokens), known - self.dropped_tokens)
        if tokens <= local_tokens:
            return Miss("own_cache" if local_tokens else "short")
        if load_tokens_max is not None:
            tokens = min(tokens, geometry.aligned(local_tokens + load_tokens_max))
            if tokens <= local_tokens:
                return Miss("asked")
        unit = geometry.hash_tokens
        dropped = self.dropped_tokens // unit
        return Bounds(local_tokens // unit, tokens // unit + dropped, dropped)


@dataclass(frozen=True)
class Patience:
    """How long a request waits for blocks that are in a tier.

    Attributes:
        wait_ms: time after which the blocks that have arrived are taken.
        begins_early: whether a load may begin before the last blocks have arrived, because the step waits for them.
        over: reason of the miss if nothing had arrived, a key of ``MISSES``.
        while_faster: whether it waits only as long as computing would take longer (P9).
        nothing: reason of the miss if the depot found nothing, a key of ``MISSES``.
    """

    wait_ms: int
    begins_early: bool
    over: str = "late"
    while_faster: bool = False
    nothing: str = "unknown"


class Lookup:
    """State of one claim for a request.

    Attributes:
        claim: holds the hit's leases until it is released.
        local_tokens: local hit after which the hit begins; the claim may begin earlier.
        started_s: when the request began to wait for blocks, maybe with an earlier lookup.
        hit: last hit reported to the scheduler.
        polled_step: step of the scheduler in which the claim was polled last; None before the first poll.
        claim_spans: spans of the claim; ``None`` = there is no tracer provider.
    """

    def __init__(
        self,
        claim: "Claim",
        local_tokens: int,
        bounds: Bounds,
        geometry: Geometry,
        patience: Patience,
        started_s: float,
        rates: Rates,
    ) -> None:
        self.claim = claim
        self.local_tokens = local_tokens
        self.started_s = started_s
        self.hit: Hit | None = None
        self.polled_step: int | None = None
        self.claim_spans: ClaimSpans | None = None
        self._bounds = bounds
        self._geometry = geometry
        self._patience = patience
        self._rates = rates
        self._settled = False
        self._openings = claim.openings
        self._began_anew = False
        self._over = patience.nothing
        self._expected_tokens = self._at_stake_tokens = 0

    def begin_after(self, local_tokens: int) -> bool:
        """Shortens the lookup to what lies beyond a longer local hit. Returns false if it has to be made anew.

        With a window it has to: a hit that begins elsewhere needs other blocks of the window. So does one that found
        nothing beyond: a tier may have it.
        """
        unit, grown = self._geometry.hash_tokens, local_tokens - self.local_tokens
        if self._settled and (self.hit is None or self.hit.tokens <= grown):
            return False
        if grown < 0 or self._geometry.windowed or local_tokens >= (self._bounds.limit - self._bounds.dropped) * unit:
            return False
        self.local_tokens, self._bounds = local_tokens, self._bounds._replace(skip=local_tokens // unit)
        self._expected_tokens = max(0, self._expected_tokens - grown)
        self._at_stake_tokens = max(0, self._at_stake_tokens - grown)
        return True

    def release(self) -> None:
        """Drops the claim and its leases."""
        self._rates.reads.over(self)
        release_claim(self.claim, self.claim_spans)

    def poll(self, now_s: float, idle: IdleTime) -> Pending | Miss | Hit:
        """Polls the claim; an unsettled claim may take the step's idle time."""
        answer = self._poll(now_s, idle)
        if not isinstance(answer, Pending):
            self._rates.reads.over(self)
        return answer

    def _poll(self, now_s: float, idle: IdleTime) -> Pending | Miss | Hit:
        settled, units, from_tier = self.claim.poll()
        if not settled:
            openings = self.claim.openings
            if self._is_anew(openings):
                self.hit, self.started_s, self._over = None, now_s, self._patience.nothing
                self._expected_tokens = self._at_stake_tokens = 0
            self._openings = openings
        self._settled = settled
        if not settled and (wait_ms := idle.take_ms()):
            settled, units, from_tier = self.claim.wait(wait_ms)
        if not settled and (now_s - self.started_s) * 1e3 >= self._patience.wait_ms:
            self._over = self._patience.over
            settled, units, from_tier = self.claim.settle()
        elif not settled and self._patience.while_faster and self._is_slower(now_s):
            self._over = "slower"
            settled, units, from_tier = self.claim.decline()
        self._settled = settled
        if settled:
            return self._found(units, from_tier)
        return self._nearly_there(now_s) if idle.idle and self._patience.begins_early else PENDING

    def _is_anew(self, openings: int) -> bool:
        """Returns whether the depot had let the claim go and looks anew: the time until then was no wait for blocks.

        Of a claim that was not settled, once only: with steps longer than the depot keeps a claim, the request would
        wait for ever (P2).
        """
        if self._settled:
            return True
        if self._began_anew or openings == self._openings:
            return False
        self._began_anew = True
        return True

    def _is_slower(self, now_s: float) -> bool:
        """Returns whether computing is faster than waiting on: then arrived blocks are taken, the rest is computed."""
        waited_s, arriving, rates = now_s - self.started_s, self.claim.arriving(), self._rates
        if arriving is None:
            # Not even the size of the hit is known.
            rates.reads.over(self)
            return rates.loses((self._bounds.limit - self._bounds.skip) * self._geometry.hash_tokens, waited_s)
        units, units_now, _, come, left = arriving
        rates.reads.look(self, come, left, now_s)
        self._expected_tokens = max(self._expected_tokens, self._tokens(units))
        # Tokens that would have to be computed if the hit ended here.
        rest = max(0, self._tokens(units)) - max(0, self._tokens(units_now))
        self._at_stake_tokens = max(self._at_stake_tokens, rest)
        return rates.loses(self._at_stake_tokens, waited_s) or rates.will_lose(rest, left, now_s)

    def _nearly_there(self, now_s: float) -> Pending | Miss | Hit:
        """Returns the hit if its load may begin before the last blocks have been read.

        Copying the blocks that are there takes about as long as reading those. The step that waits for them delays no
        other request, and its patience is bounded: blocks that have not arrived are computed (P2).
        """
        arriving = self.claim.arriving()
        if arriving is None:
            return PENDING
        units, _, from_tier, come, left = arriving
        rest_ms = (now_s - self.started_s) * 1e3 * left / come if come else math.inf
        return self._found(units, from_tier) if rest_ms <= REST_MS_MAX else PENDING

    def _found(self, units: int, from_tier: int) -> Miss | Hit:
        unit = self._geometry.hash_tokens
        tokens = self._tokens(units)
        declined = max(0, self._expected_tokens - max(0, tokens)) if self._over == "slower" else 0
        if tokens <= 0:
            return Miss(self._over, units * unit // self._geometry.hit_tokens, declined)
        self.hit = Hit(tokens, min(tokens, from_tier * unit), declined)
        return self.hit

    def _tokens(self, units: int) -> int:
        """Returns the tokens of a hit that ends after ``units`` units, beyond those that the engine already has."""
        return (units - self._bounds.dropped) * self._geometry.hash_tokens - self.local_tokens


def release_claim(claim: "Claim", spans: "ClaimSpans | None", *, tells_reads: bool = False) -> Sequence["TierReads"]:
    """Drops a claim and its leases, and writes its spans, if there are any.

    Returns what came for it from each tier, if asked for and if a depot still held it.
    """
    times = claim.release(tell_times=tells_reads) if spans is None else spans.release(claim, tells_reads)
    return times.tiers if tells_reads and times is not None else ()
