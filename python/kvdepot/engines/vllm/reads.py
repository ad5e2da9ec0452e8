"""Rate at which blocks come from tiers, measured over all lookups that wait for them. Nothing here reads a clock.

Lookups share the tiers, so their waits are measured together: the tiers are busy while any lookup waits for a block,
and that time counts once. An engine polls its lookups between steps, and a step may be long. So time counts only if
blocks are still missing at its end: blocks that arrived in the last stretch of a wait did so at an unknown moment.
"""

HALF_LIFE_S = 1.0
"""Busy seconds after which a measurement's weight is halved."""

EVIDENCE_S = 0.05
"""Busy seconds that are measured before anything is concluded from them."""

LATENCY_S = 0.05
"""Seconds before the first block of a busy period that do not count: the tier's latency, not its rate."""

FORGET_S = 60.0
"""Seconds without a measurement after which the estimate is dropped and tiers are tried again."""


class Reads:
    """Busy seconds per block."""

    def __init__(self) -> None:
        self._seconds = self._blocks = 0.0
        self._unsure_s = self._unsure_blocks = 0.0
        self._waiting: dict[object, int] = {}
        self._grace_s = 0.0
        self._looked_s = self._measured_s = 0.0

    def look(self, lookup: object, come: int, left: int, now_s: float) -> None:
        """Notes that a lookup waits for ``left`` blocks from tiers; ``come`` have arrived since it began."""
        before = self._waiting.get(lookup)
        if self._waiting:
            self._unsure_s += max(0.0, now_s - self._looked_s)
            self._unsure_blocks += max(0, come - (before or 0))
        else:
            # A busy period begins. Blocks that have arrived by now did so in unmeasured time.
            self._grace_s = LATENCY_S
        self._looked_s = now_s
        if left > 0:
            self._waiting[lookup] = come
            self._count(now_s)
        else:
            self.over(lookup)

    def over(self, lookup: object) -> None:
        """Notes that a lookup no longer waits."""
        self._waiting.pop(lookup, None)
        if not self._waiting:
            self._unsure_s = self._unsure_blocks = 0.0

    def seconds(self, blocks: int, now_s: float) -> float | None:
        """Returns how long ``blocks`` more blocks take while the tiers are busy; ``None`` while too little is known."""
        if self._seconds < EVIDENCE_S or now_s - self._measured_s > FORGET_S:
            return None
        return blocks * self._seconds / self._blocks if self._blocks else float("inf")

    def _count(self, now_s: float) -> None:
        if not self._unsure_s:
            return
        if now_s - self._measured_s > FORGET_S:
            self._seconds = self._blocks = 0.0
        latency_s = min(self._grace_s, self._unsure_s)
        self._grace_s = 0.0 if self._unsure_blocks else self._grace_s - latency_s
        seconds = self._unsure_s - latency_s
        if seconds > 0:
            left = 0.5 ** (seconds / HALF_LIFE_S)
            self._seconds = self._seconds * left + seconds
            self._blocks = self._blocks * left + self._unsure_blocks
            self._measured_s = now_s
        self._unsure_s = self._unsure_blocks = 0.0
