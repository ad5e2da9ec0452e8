"""How fast blocks come from tiers, measured over all lookups that wait for them. Nothing here reads a clock.

Lookups share the tiers, so their waits are measured together: while any of them waits for a block the tiers are busy,
and that time counts once. An engine looks at its lookups between steps, and a step may be long. So time counts only if
blocks are still missing at its end: what came in the last stretch of a wait came at a moment that nobody saw.
"""

HALF_LIFE_S = 1.0
"""After so much busy time, a measurement counts half."""

EVIDENCE_S = 0.05
"""Busy time that is measured before anything is concluded from it."""

LATENCY_S = 0.05
"""Time before the first block of a busy period that does not count: the tier's latency, not its rate."""

FORGET_S = 60.0
"""After so long without a measurement, what was known is forgotten and tiers are tried again."""


class Reads:
    """Busy seconds a block."""

    def __init__(self) -> None:
        self._seconds = self._blocks = 0.0
        self._unsure_s = self._unsure_blocks = 0.0
        self._waiting: dict[object, int] = {}
        self._grace_s = 0.0
        self._looked_s = self._measured_s = 0.0

    def look(self, lookup: object, come: int, left: int, now_s: float) -> None:
        """A lookup waits for ``left`` blocks from tiers; ``come`` have come since it began."""
        before = self._waiting.get(lookup)
        if self._waiting:
            self._unsure_s += max(0.0, now_s - self._looked_s)
            self._unsure_blocks += max(0, come - (before or 0))
        else:
            # A busy period begins. What has come by now came in a time that nobody measured.
            self._grace_s = LATENCY_S
        self._looked_s = now_s
        if left > 0:
            self._waiting[lookup] = come
            self._count(now_s)
        else:
            self.over(lookup)

    def over(self, lookup: object) -> None:
        """A lookup does not wait any longer."""
        self._waiting.pop(lookup, None)
        if not self._waiting:
            self._unsure_s = self._unsure_blocks = 0.0

    def seconds(self, blocks: int, now_s: float) -> float | None:
        """How long so many more blocks take while the tiers are busy; ``None`` while too little is known."""
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
