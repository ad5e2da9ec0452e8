"""Answers to subscribers that ask for missed batches, which leave at the pace at which they read. Pure."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Message = TypeVar("Message")

ANSWERS_MAX = 16
"""Maximum number of answers at a time."""
MESSAGES_PER_TURN = 256
"""Maximum number of messages to one subscriber before the next one's turn."""
STALLED_S = 30.0
"""An answer of which nothing could be sent for this long is dropped."""


class _Answer(Generic[Message]):
    def __init__(self, messages: Sequence[Message], now_s: float) -> None:
        self.messages = deque(messages)
        self.moved_s = now_s


class Replays(Generic[Message]):
    """The answers that are under way, one for each subscriber."""

    def __init__(self) -> None:
        self._answers: dict[bytes, _Answer[Message]] = {}
        self.dropped = 0
        """Number of answers that were dropped, because the subscriber did not read them or there were too many."""

    def __len__(self) -> int:
        """Returns the number of answers that are under way."""
        return len(self._answers)

    def has_room(self, subscriber: bytes) -> bool:
        """Returns whether an answer to this subscriber can begin."""
        return subscriber in self._answers or len(self._answers) < ANSWERS_MAX

    def begin(self, subscriber: bytes, messages: Sequence[Message], now_s: float) -> None:
        """Begins an answer. An earlier one to the same subscriber ends, since it asks anew."""
        self._answers[subscriber] = _Answer(messages, now_s)

    def turn(self, send: Callable[[bytes, Message], bool], now_s: float) -> bool:
        """Sends some of each answer. Returns whether anything was sent.

        Args:
            send: sends a message to a subscriber; returns false if its queue is full.
            now_s: a monotonic time.
        """
        moved = False
        for subscriber, answer in list(self._answers.items()):
            sent = 0
            while answer.messages and sent < MESSAGES_PER_TURN and send(subscriber, answer.messages[0]):
                answer.messages.popleft()
                sent += 1
            if sent:
                answer.moved_s, moved = now_s, True
            elif now_s - answer.moved_s > STALLED_S:
                self.dropped += 1
                del self._answers[subscriber]
                continue
            if not answer.messages:
                del self._answers[subscriber]
        return moved
