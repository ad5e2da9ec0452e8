"""Answers to subscribers that ask for missed batches, which leave at the pace at which they read. Pure."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Message = TypeVar("Message")

ANSWERS_MAX = 16
"""Maximum number of answers at a time, those included that have not begun."""
MESSAGES_PER_TURN = 256
"""Maximum number of messages to one subscriber before the next one's turn."""
STALLED_S = 30.0
"""An answer of which nothing could be sent for this long is dropped."""


@dataclass(frozen=True)
class Request:
    """What a subscriber asks for: all batches from ``start``."""

    subscriber: bytes
    start: int


class _Answer(Generic[Message]):
    def __init__(self, messages: Sequence[Message], now_s: float) -> None:
        self.messages = deque(messages)
        self.moved_s = now_s


class Replays(Generic[Message]):
    """The requests that wait, and the answers that are under way, at most one for each subscriber.

    Every request is answered, each subscriber's in their order, unless the subscriber stops reading.
    """

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self._answers: dict[bytes, _Answer[Message]] = {}
        self.dropped = 0
        """Number of answers that were dropped, because the subscriber did not read them."""

    def __len__(self) -> int:
        """Returns the number of answers that wait or are under way."""
        return len(self._waiting) + len(self._answers)

    @property
    def has_room(self) -> bool:
        """Whether another request can be taken."""
        return len(self) < ANSWERS_MAX

    def ask(self, request: Request) -> None:
        """Takes a request. There must be room."""
        self._waiting.append(request)

    def next(self, admits: Callable[[int], bool]) -> Request | None:
        """Takes the first request that can be answered now; ``begin`` must follow.

        Args:
            admits: returns whether a request for the batches from a number may be answered now.
        """
        busy = set(self._answers)
        for request in self._waiting:
            if request.subscriber not in busy and admits(request.start):
                self._waiting.remove(request)
                return request
            busy.add(request.subscriber)
        return None

    def begin(self, subscriber: bytes, messages: Sequence[Message], now_s: float) -> None:
        """Begins the answer to a request that ``next`` has returned."""
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
                self._drop(subscriber)
                continue
            if not answer.messages:
                del self._answers[subscriber]
        return moved

    def _drop(self, subscriber: bytes) -> None:
        before = len(self)
        del self._answers[subscriber]
        self._waiting = deque(one for one in self._waiting if one.subscriber != subscriber)
        self.dropped += before - len(self)
