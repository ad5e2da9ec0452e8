"""P9: what computing costs this engine, and whether waiting for blocks of a tier costs more.

Nothing here reads a clock.
"""

from dataclasses import dataclass

STEP_TOKENS_MIN = 256
"""Steps with fewer tokens are not measured: most of their time does not depend on how many there are."""

SAMPLES_MIN = 3
"""So many steps, or reads, are seen before anything is concluded from them."""

DECAY = 0.8
"""What a new sample leaves of the weight of those before it."""

STEPS_MAX = 16
"""Steps under way whose beginning is remembered; a step that breaks off never ends."""

LOSS_FACTOR = 1.5
"""Waiting has to take so many times as long as computing before it is given up: a request that waits keeps no other
request from the device, and one that computes does."""

FORGET_S = 60.0
"""After so long without a read, what was known of tiers is forgotten and they are tried again."""


class Cost:
    """Seconds a token, over the latest samples."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0
        self._samples = 0

    def add(self, tokens: float, seconds: float) -> None:
        """So many tokens took so long."""
        if tokens <= 0 or seconds < 0:
            return
        self._seconds = self._seconds * DECAY + seconds
        self._tokens = self._tokens * DECAY + tokens
        self._samples += 1

    def of(self, tokens: float) -> float | None:
        """Seconds that so many tokens take; ``None`` while too little is known."""
        return tokens * self._seconds / self._tokens if self._samples >= SAMPLES_MIN else None


@dataclass(frozen=True)
class Arriving:
    """Blocks of a hit on their way from tiers.

    Attributes:
        tokens: the hit, when all have come.
        come: blocks that have come.
        left: blocks that have not.
        for_s: how long that has taken so far.
    """

    tokens: int
    come: int
    left: int
    for_s: float


class Rates:
    """What an engine has measured."""

    def __init__(self) -> None:
        self.compute = Cost()
        self._read = Cost()
        self._read_s = 0.0
        self._steps: dict[int, tuple[int, float]] = {}
        self._number = 0
        self._ended_s = 0.0

    # Computing. Steps may overlap in their planning, not on the device: one takes from the end of the one before.

    def step_began(self, tokens: int, now_s: float) -> int:
        """A step with so many tokens is handed to the workers; its number, or 0 if it is not worth measuring."""
        if tokens < STEP_TOKENS_MIN:
            return 0
        self._number += 1
        self._steps[self._number] = (tokens, now_s)
        if len(self._steps) > STEPS_MAX:
            self._steps.pop(next(iter(self._steps)))
        return self._number

    def step_ended(self, number: int, now_s: float) -> None:
        """All workers have ended that step."""
        step = self._steps.pop(number, None)
        if step is not None:
            tokens, began_s = step
            self.compute.add(tokens, now_s - max(began_s, self._ended_s))
            self._ended_s = now_s

    # Waiting.

    def waited(self, tokens: int, seconds: float, now_s: float) -> None:
        """So many tokens came from tiers within this time."""
        self._read.add(tokens, seconds)
        self._read_s = now_s

    def loses(self, tokens: int, for_s: float) -> bool:
        """Whether a request has waited for longer than computing these tokens takes."""
        compute_s = self.compute.of(tokens)
        return compute_s is not None and for_s > compute_s * LOSS_FACTOR

    def will_lose(self, arriving: Arriving, now_s: float) -> bool:
        """Whether what has not come yet will take longer to come than to compute."""
        blocks = arriving.come + arriving.left
        rest = arriving.tokens * arriving.left / blocks if blocks else 0.0
        compute_s = self.compute.of(rest)
        if compute_s is None:
            return False
        if arriving.come:
            rest_s: float | None = arriving.for_s * arriving.left / arriving.come
        elif now_s - self._read_s <= FORGET_S:
            known_s = self._read.of(rest)
            rest_s = None if known_s is None else known_s - arriving.for_s
        else:
            rest_s = None
        return rest_s is not None and rest_s > compute_s * LOSS_FACTOR
