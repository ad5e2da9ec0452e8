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
HELD_BYTES_MAX = 256 << 20
"""Bytes that answers hold beyond which no other one begins; those that take too long make room."""


@dataclass(frozen=True)
class Request:
    """What a subscriber asks for: all batches from ``start``."""

    subscriber: bytes
    start: int


class _Answer(Generic[Message]):
    def __init__(self, messages: Sequence[Message], now_s: float) -> None:
        self.messages = deque(messages)
        self.began_s = self.moved_s = now_s


class Replays(Generic[Message]):
    """The requests that wait, and the answers that are under way, at most one for each subscriber.

    Every request is answered, each subscriber's in their order, unless the subscriber stops reading.
    """

    def __init__(self, bytes_of: Callable[[Message], bytes] = lambda _: b"") -> None:
        """Begins without requests.

        Args:
            bytes_of: returns the bytes of a message. Messages of several answers may share them.
        """
        self._bytes_of = bytes_of
        self._sharers: dict[int, int] = {}
        """Number of messages with the same bytes, by their identity."""
        self.held_bytes = 0
        """Bytes of all messages that have not been sent."""
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

    def next(self, admits: Callable[[int], bool], now_s: float) -> Request | None:
        """Takes the first request that can be answered now; ``begin`` must follow.

        Args:
            admits: returns whether a request for the batches from a number may be answered now.
            now_s: a monotonic time.
        """
        if self._waiting and not self._makes_room(now_s):
            return None
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
        for message in messages:
            self._hold(message)

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
                self._let_go(answer.messages.popleft())
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
        for message in self._answers.pop(subscriber).messages:
            self._let_go(message)
        self._waiting = deque(one for one in self._waiting if one.subscriber != subscriber)
        self.dropped += before - len(self)

    def _makes_room(self, now_s: float) -> bool:
        """Drops the oldest answers while all hold too much. Returns whether another one may begin.

        The more they hold, the longer they may take: what is read at ``HELD_BYTES_MAX / STALLED_S`` is never dropped.
        """
        while self.held_bytes > HELD_BYTES_MAX:
            oldest = min(self._answers, key=lambda subscriber: self._answers[subscriber].began_s)
            patience_s = STALLED_S * (1 + self.held_bytes / HELD_BYTES_MAX)
            if now_s - self._answers[oldest].began_s <= patience_s:
                return False
            self._drop(oldest)
        return True

    def _hold(self, message: Message) -> None:
        held = self._bytes_of(message)
        sharers = self._sharers.get(id(held), 0)
        self._sharers[id(held)] = sharers + 1
        self.held_bytes += 0 if sharers else len(held)

    def _let_go(self, message: Message) -> None:
        held = self._bytes_of(message)
        sharers = self._sharers.pop(id(held)) - 1
        if sharers:
            self._sharers[id(held)] = sharers
        else:
            self.held_bytes -= len(held)
