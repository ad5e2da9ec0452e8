"""Replays of a trace for several sizes and orders of eviction."""

import json
import time
import typing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from kvdepot._native import Trace
from kvdepot.config.depot_keys import DepotKeys
from kvdepot.traces.sizes import Tier

POLICIES: tuple[str, ...] = typing.get_args(DepotKeys.model_fields["eviction"].annotation)
"""Orders of eviction that a depot has."""
BELADY = "belady"
"""The best that an order could do if it knew the future; for one level only."""
PARTS = (64, 16, 8, 4, 2, 1)
"""Sizes that are tried when none is said: these parts of all different blocks."""


@dataclass(frozen=True)
class Point:
    """What came of one replay.

    Attributes:
        blocks: size of the pool.
        hit: part of all blocks named that would have been loaded.
        levels: of these, by level, the pool first.
        written: blocks that each level was given.
        more: what each level would add to ``hit`` if it alone were larger.
        references_per_s: how fast the replay was.
    """

    policy: str
    blocks: int
    hit: float
    levels: tuple[float, ...]
    written: tuple[int, ...]
    more: tuple[float, ...]
    references_per_s: float

    def json(self, block_bytes: float | None) -> dict[str, object]:
        """For programs."""
        size = None if block_bytes is None else self.blocks * block_bytes
        return {**asdict(self), "bytes": size}


@dataclass(frozen=True)
class Sweep:
    """What is to be tried on a trace."""

    policies: Sequence[str]
    sizes: Sequence[int]
    tiers: Sequence[Tier] = ()
    more_blocks: int = 0

    def points(self, trace: Trace) -> Iterator[Point]:
        """Every size with every policy."""
        references = max(1, trace.counts()[1])
        for blocks in self.sizes:
            for policy in self.policies:
                yield self._point(trace, policy, blocks, references)

    def _point(self, trace: Trace, policy: str, blocks: int, references: int) -> Point:
        begun = time.perf_counter()
        if policy == BELADY:
            hits = trace.belady(blocks)
            seconds = time.perf_counter() - begun
            more = (trace.belady(blocks + self.more_blocks) - hits) / references if self.more_blocks else 0.0
            part = hits / references
            return Point(policy, blocks, part, (part,), (), (more,), references / seconds)
        levels = [{"capacity": blocks, "policy": policy}, *(tier.level() for tier in self.tiers)]
        found = json.loads(trace.replay(json.dumps(levels)))
        seconds = time.perf_counter() - begun
        more_of = []
        for index in range(len(levels)):
            if self.more_blocks:
                grown = [dict(level) for level in levels]
                grown[index]["capacity"] = typing.cast("int", grown[index]["capacity"]) + self.more_blocks
                hits = json.loads(trace.replay(json.dumps(grown)))["hits"]
                more_of.append((hits - found["hits"]) / references)
        return Point(
            policy,
            blocks,
            found["hits"] / references,
            tuple(level["hits"] / references for level in found["levels"]),
            tuple(level["written"] for level in found["levels"]),
            tuple(more_of),
            references / seconds,
        )


def usual_sizes(distinct: int) -> list[int]:
    """Sizes from a small part of all different blocks to all of them."""
    return sorted({max(1, distinct // part) for part in PARTS})
