"""Limits how many requests to the depot one step of the scheduler makes, however many requests wait.

vLLM walks over all waiting requests in every step while it has a free place and can admit none of them. A thousand
requests whose blocks are still being read would cost a thousand round trips in each step.
"""

PENDING_CLAIMS_PER_STEP = 32
"""New claims of one step that may stay pending. After them, requests that have no claim yet wait for the next step.
Claims that settle immediately do not count: vLLM admits those requests, and its own limits end the walk."""

FIRST_POLLS = 16
"""Pending claims that are polled in every step: those at the head of the queue, which vLLM admits first."""

RELEASES_PER_STEP = 32
"""Claims of one step that may be released to be made anew, because vLLM's own hit has changed."""

OTHER_POLLS = 16
"""Average number of the other pending claims that are polled in a step; they take turns."""

POLLS_PER_STEP = FIRST_POLLS + 2 * OTHER_POLLS
"""Maximum number of polls of pending claims in one step."""


class Turns:
    """Limits the claims and polls of a step. Counts steps, reads no clock."""

    def __init__(self) -> None:
        self._step = 0
        self._new_pending = self._polls = self._releases = 0
        self._pending = self._pending_before = 0

    def next_step(self) -> None:
        """Notes that the scheduler has planned a step: the next walk over the waiting requests begins."""
        self._step += 1
        self._new_pending = self._polls = self._releases = 0
        self._pending_before, self._pending = self._pending, 0

    def may_claim(self) -> bool:
        """Returns whether this step may open another claim."""
        return self._new_pending < PENDING_CLAIMS_PER_STEP

    def claim_is_pending(self) -> None:
        """Notes that a claim of this step did not settle immediately."""
        self._new_pending += 1

    def may_release(self) -> bool:
        """Returns whether this step may release another claim to make it anew, and counts it."""
        if self._releases >= RELEASES_PER_STEP:
            return False
        self._releases += 1
        return True

    def may_poll(self, last_step: int) -> bool:
        """Returns whether a pending claim that was last polled in step ``last_step`` may be polled now."""
        self._pending += 1
        others = max(0, self._pending_before - FIRST_POLLS)
        is_turn = self._step - last_step >= -(-others // OTHER_POLLS)
        if self._polls >= FIRST_POLLS and (self._polls >= POLLS_PER_STEP or not is_turn):
            return False
        self._polls += 1
        return True

    @property
    def step(self) -> int:
        """Number of the current step."""
        return self._step
