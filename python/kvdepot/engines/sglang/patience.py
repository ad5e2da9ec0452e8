"""How long lookups may wait for tiers while SGLang's scheduler waits for them. No clock, no depot."""

AGAIN_S = 0.05
"""Seconds that a lookup waits when SGLang repeats a question that has found nothing."""
PART = 10
"""Waits in vain take at most one part in this many of the time."""
FREE_S = 0.01
"""A lookup may take this many seconds without having waited for a tier."""


class Patience:
    """Limits the waits of one scheduler: those in vain may take ``wait_s`` seconds in a period of ``PART`` times that.

    A wait is in vain if it runs out. A rank among several knows only its own hit, and SGLang takes what all have found.
    So each of its waits counts until SGLang loads the hit. Periods begin at the same time on all ranks, so that all
    wait for the same requests: a hit that only some ranks wait for is none.

    Args:
        wait_s: seconds that a lookup may wait.
        is_limited: whether waits in vain are limited.
        is_alone: whether there are no other ranks.
    """

    def __init__(self, wait_s: float, *, is_limited: bool, is_alone: bool = True) -> None:
        self.wait_s = wait_s
        self._is_limited = is_limited and wait_s > 0
        self._is_alone = is_alone
        self._period = 0
        self._spent_s = 0.0

    def limit(self, now_s: float, *, is_repeated: bool) -> float:
        """Returns how many seconds a lookup that begins now may wait. All ranks must have the same clock."""
        left_s = self.wait_s
        if self._is_limited:
            period = int(now_s // (PART * self.wait_s))
            if period != self._period:
                self._period, self._spent_s = period, 0.0
            left_s = max(0.0, self.wait_s - self._spent_s)
        return min(left_s, AGAIN_S) if is_repeated else left_s

    def waited(self, limit_s: float, began_s: float, now_s: float) -> float:
        """Notes that a lookup which was allowed to wait ``limit_s`` has ended. Returns the argument for ``loaded``."""
        waited_s = max(0.0, now_s - began_s)
        ran_out = waited_s >= limit_s
        if not self._is_limited or limit_s <= 0 or (not ran_out and (self._is_alone or waited_s <= FREE_S)):
            return 0.0
        self._spent_s += waited_s
        return 0.0 if ran_out else waited_s

    def loaded(self, waited_s: float) -> None:
        """Notes that SGLang loads what a lookup has found: all ranks have found it, so its wait was not in vain."""
        self._spent_s = max(0.0, self._spent_s - waited_s)
