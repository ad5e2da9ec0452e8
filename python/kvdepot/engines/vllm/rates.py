"""P9: measures what computing costs this engine, and whether waiting for blocks of a tier costs more.

Nothing here reads a clock.
"""

from kvdepot.engines.vllm.reads import Reads

STEP_TOKENS_MIN = 256
"""Steps with fewer prompt tokens are not measured: most of their time does not depend on the number of tokens."""

DECODE_SHARE_MAX = 0.25
"""Steps with a larger share of decoded tokens are not measured: those have another cost."""

SAMPLES_MIN = 3
"""Number of steps before anything is concluded from them."""

TOKENS_MIN = 4096
"""Number of tokens that replaces the number of steps: one long step says as much as several short ones."""

DECAY = 0.8
"""Factor by which a new sample reduces the weight of earlier ones."""

STEPS_MAX = 16
"""Steps in flight whose start is remembered; a step that fails never ends."""

LOSS_FACTOR = 1.5
"""A request stops waiting only when that takes this many times as long as computing: a request that waits does not
keep others from the device, but one that computes does."""


class Cost:
    """Seconds per token, over the latest samples."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0
        self._samples = 0

    def add(self, tokens: float, seconds: float) -> None:
        """Adds a sample: this many tokens took this long."""
        if tokens <= 0 or seconds < 0:
            return
        self._seconds = self._seconds * DECAY + seconds
        self._tokens = self._tokens * DECAY + tokens
        self._samples += 1

    def add_at_most(self, tokens: float, seconds: float) -> None:
        """Adds an upper bound; it counts only if it lowers the estimate, or if nothing is known."""
        known = self.of(tokens)
        if known is None or seconds < known:
            self.add(tokens, seconds)

    def of(self, tokens: float) -> float | None:
        """Returns the seconds that this many tokens take; ``None`` while too little is known."""
        known = self._samples >= SAMPLES_MIN or self._tokens >= TOKENS_MIN
        return tokens * self._seconds / self._tokens if known else None


class Rates:
    """An engine's measurements.

    Attributes:
        compute: seconds per prompt token.
        reads: seconds per block from tiers.
    """

    def __init__(self) -> None:
        self.compute = Cost()
        self.reads = Reads()
        self._steps: dict[int, tuple[int, float, bool]] = {}
        self._number = 0
        self._ended_s = 0.0
        self._after_untimed = False

    # Computing. The planning of steps may overlap, but not on the device: a step lasts from the end of the previous
    # one.

    def step_began(self, tokens: int, decoding: int, now_s: float, *, waits: bool = False) -> int:
        """Notes a step that is handed to the workers. Returns its number, or 0 if it is not worth measuring.

        Args:
            tokens: all tokens that it computes.
            decoding: number of them that are decoded.
            now_s: current time.
            waits: whether it waits for a load; then its duration says nothing about computing.
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
        """Notes that all workers have ended the step."""
        step = self._steps.pop(number, None)
        if step is None:
            return
        tokens, began_s, after_untimed = step
        seconds = now_s - max(began_s, self._ended_s)
        # With asynchronous scheduling the previous step, whose end was not reported, may overlap this one's time.
        (self.compute.add_at_most if after_untimed else self.compute.add)(tokens, seconds)
        self._ended_s = now_s

    # Waiting.

    def loses(self, tokens: int, for_s: float) -> bool:
        """Returns whether a request has waited longer than computing these tokens takes."""
        compute_s = self.compute.of(tokens)
        return compute_s is not None and for_s > compute_s * LOSS_FACTOR

    def will_lose(self, tokens: int, blocks_left: int, now_s: float) -> bool:
        """Returns whether these blocks will take longer to arrive than computing the tokens that depend on them."""
        compute_s, rest_s = self.compute.of(tokens), self.reads.seconds(blocks_left, now_s)
        return compute_s is not None and rest_s is not None and rest_s > compute_s * LOSS_FACTOR
