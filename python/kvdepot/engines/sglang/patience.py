"""How long a lookup may wait for tiers while SGLang's scheduler waits for it. No clock, no depot."""

AGAIN_S = 0.05
"""Seconds that a lookup waits when SGLang repeats a question that has found nothing."""
REST = 9
"""After a wait that ran out, none follows for this many times as long: such waits take at most a tenth of the time."""


class Patience:
    """Limits the waits of one scheduler.

    Args:
        wait_s: seconds that a lookup may wait.
        rests: whether a wait that ran out is followed by a rest, in which no lookup waits.
    """

    def __init__(self, wait_s: float, *, rests: bool) -> None:
        self.wait_s = wait_s
        self._rests = rests
        self._rest_until_s = 0.0

    def limit(self, now_s: float, *, is_repeated: bool) -> float:
        """Returns how many seconds a lookup that begins now may wait."""
        if now_s < self._rest_until_s:
            return 0.0
        return min(self.wait_s, AGAIN_S) if is_repeated else self.wait_s

    def waited(self, limit_s: float, began_s: float, now_s: float) -> None:
        """Notes that a lookup which was allowed to wait ``limit_s`` has ended."""
        waited_s = now_s - began_s
        if self._rests and 0 < limit_s <= waited_s:
            self._rest_until_s = now_s + REST * waited_s
