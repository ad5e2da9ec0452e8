"""Seeded traces similar to real services: seed and family determine the requests, on every machine."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from kvdepot.traces.files import Request

BLOCK_TOKENS = 512
ANSWER_TOKENS_MEAN = 350


@dataclass
class Chain:
    """Blocks of a growing prompt."""

    blocks: list[int] = field(default_factory=list)


class Maker:
    """Numbers blocks, and counts tokens and time."""

    def __init__(self, seed: int, per_second: float) -> None:
        self.random = random.Random(seed)  # noqa: S311 - the same trace for the same seed
        self._per_second = per_second
        self._blocks = 0
        self._now_ms = 0.0

    def fresh(self, count: int) -> list[int]:
        """Returns new blocks."""
        self._blocks += count
        return list(range(self._blocks - count, self._blocks))

    def size(self, mean: float) -> int:
        """Returns a random number of blocks, usually small and sometimes large."""
        return max(1, round(self.random.lognormvariate(0, 0.8) * mean / 1.38))

    def request(self, blocks: list[int]) -> Request:
        """Returns the next request, after a pause as between independent users."""
        self._now_ms += self.random.expovariate(self._per_second) * 1000
        spare = self.random.randrange(BLOCK_TOKENS)  # tokens of a last block that is not full
        answer = max(1, round(self.random.expovariate(1 / ANSWER_TOKENS_MEAN)))
        return int(self._now_ms), len(blocks) * BLOCK_TOKENS + spare, answer, list(blocks)


def _popular(maker: Maker, count: int, skew: float) -> Callable[[], int]:
    """Returns a function that draws a number below ``count``, small ones more often (Zipf)."""
    weights = list(accumulate(1 / (rank + 1) ** skew for rank in range(count)))
    return lambda: maker.random.choices(range(count), cum_weights=weights)[0]


def chat(maker: Maker) -> Iterator[Request]:
    """Conversations of several turns with a few system prompts; most end early, and pauses between turns differ."""
    systems = [maker.fresh(maker.size(2)) for _ in range(8)]
    which = _popular(maker, len(systems), 1.2)
    running: list[Chain] = []
    while True:
        if not running or maker.random.random() < 0.3:
            running.append(Chain(list(systems[which()])))
            index = len(running) - 1
        else:
            # Most conversations continue soon: later ones in the list are more likely.
            index = min(len(running) - 1, int(len(running) * maker.random.random() ** 0.3))
        chain = running[index]
        chain.blocks += maker.fresh(maker.size(4))
        yield maker.request(chain.blocks)
        if maker.random.random() < 0.25 or len(chain.blocks) > 400:
            running.pop(index)
        else:
            running.append(running.pop(index))
        if len(running) > 400:
            running.pop(0)


def documents(maker: Maker) -> Iterator[Request]:
    """Questions about long documents, some of which are asked about far more often than others."""
    texts = [maker.fresh(maker.size(40)) for _ in range(600)]
    which = _popular(maker, len(texts), 0.9)
    while True:
        yield maker.request(texts[which()] + maker.fresh(1))


def agents(maker: Maker) -> Iterator[Request]:
    """A few concurrent agents, each with one system prompt and many steps that extend its context."""
    system = maker.fresh(12)
    running = [Chain(list(system)) for _ in range(24)]
    while True:
        index = maker.random.randrange(len(running))
        chain = running[index]
        chain.blocks += maker.fresh(maker.size(2))
        yield maker.request(chain.blocks)
        if maker.random.random() < 0.03 or len(chain.blocks) > 250:
            running[index] = Chain(list(system))


def scan(maker: Maker) -> Iterator[Request]:
    """A few prompts that recur among many long ones that never do."""
    kept = [maker.fresh(maker.size(10)) for _ in range(60)]
    which = _popular(maker, len(kept), 0.8)
    while True:
        if maker.random.random() < 0.5:
            yield maker.request(kept[which()] + maker.fresh(1))
        else:
            yield maker.request(maker.fresh(maker.size(30)))


FAMILIES: dict[str, Callable[[Maker], Iterator[Request]]] = {
    "agents": agents,
    "chat": chat,
    "documents": documents,
    "scan": scan,
}


def generate(family: str, *, requests: int, seed: int, per_second: float) -> Iterator[Request]:
    """Yields ``requests`` requests of a family.

    Raises:
        KeyError: there is no such family.
    """
    made = FAMILIES[family](Maker(seed, per_second))
    return (next(made) for _ in range(requests))
