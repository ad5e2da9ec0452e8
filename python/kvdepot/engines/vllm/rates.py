"""P9: what computing costs this engine, and whether waiting for blocks of a tier costs more.

Nothing here reads a clock.
"""

from kvdepot.engines.vllm.reads import Reads

STEP_TOKENS_MIN = 256
"""Steps with fewer tokens of prompts are not measured: most of their time does not depend on how many there are."""

DECODE_SHARE_MAX = 0.25
"""Steps in which more of the tokens are decoded are not measured: those cost something else."""

SAMPLES_MIN = 3
"""So many steps are seen before anything is concluded from them."""

DECAY = 0.8
"""What a new sample leaves of the weight of those before it."""

STEPS_MAX = 16
"""Steps under way whose beginning is remembered; a step that breaks off never ends."""

LOSS_FACTOR = 1.5
"""Waiting has to take so many times as long as computing before it is given up: a request that waits keeps no other
request from the device, and one that computes does."""


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

    def add_at_most(self, tokens: float, seconds: float) -> None:
        """So many tokens took no longer than that: counts when it is news, or nothing is known."""
        known = self.of(tokens)
        if known is None or seconds < known:
            self.add(tokens, seconds)

    def of(self, tokens: float) -> float | None:
        """Seconds that so many tokens take; ``None`` while too little is known."""
        return tokens * self._seconds / self._tokens if self._samples >= SAMPLES_MIN else None


class Rates:
    """What an engine has measured.

    Attributes:
        compute: seconds a token of a prompt.
        reads: seconds a block from tiers.
    """

    def __init__(self) -> None:
        self.compute = Cost()
        self.reads = Reads()
        self._steps: dict[int, tuple[int, float, bool]] = {}
        self._number = 0
        self._ended_s = 0.0
        self._after_untimed = False

    # Computing. Steps may overlap in their planning, not on the device: one takes from the end of the one before.

    def step_began(self, tokens: int, decoding: int, now_s: float, *, waits: bool = False) -> int:
        """A step is handed to the workers; its number, or 0 if it is not worth measuring.

        Args:
            tokens: all that it computes.
            decoding: those of them that are decoded.
            now_s: the time.
            waits: whether it waits for a load, which tells nothing of what computing takes.
        """
        after_untimed, self._after_untimed = self._after_untimed, tokens > 0
        if waits or tokens - decoding < STEP_TOKENS_MIN or decoding > tokens * DECODE_SHARE_MAX:
            return 0
        self._after_untimed = False
        self._number += 1
        self._steps[self._number] = (tokens, now_s, after_untimed)
        if len(self._steps) > STEPS_MAX:
            self._steps.pop(next(iter(self._steps)))
        return self._number

    def step_ended(self, number: int, now_s: float) -> None:
        """All workers have ended that step."""
        step = self._steps.pop(number, None)
        if step is None:
            return
        tokens, began_s, after_untimed = step
        seconds = now_s - max(began_s, self._ended_s)
        # With asynchronous scheduling the step before, whose end nobody told, may have run into this one's time.
        (self.compute.add_at_most if after_untimed else self.compute.add)(tokens, seconds)
        self._ended_s = now_s

    # Waiting.

    def loses(self, tokens: int, for_s: float) -> bool:
        """Whether a request has waited for longer than computing these tokens takes."""
        compute_s = self.compute.of(tokens)
        return compute_s is not None and for_s > compute_s * LOSS_FACTOR

    def will_lose(self, tokens: int, blocks_left: int, now_s: float) -> bool:
        """Whether these blocks will take longer to come than computing the tokens takes that depend on them."""
        compute_s, rest_s = self.compute.of(tokens), self.reads.seconds(blocks_left, now_s)
        return compute_s is not None and rest_s is not None and rest_s > compute_s * LOSS_FACTOR
