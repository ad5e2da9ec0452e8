"""Replays of a trace for several sizes and eviction orders."""

import json
import time
import typing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from kvdepot._native import Trace
from kvdepot.config.depot_keys import DepotKeys
from kvdepot.traces.sizes import Tier

POLICIES: tuple[str, ...] = typing.get_args(DepotKeys.model_fields["eviction"].annotation)
"""Eviction orders that a depot has."""
BELADY = "belady"
"""The optimal eviction order, which knows the future; for one level only."""
PARTS = (64, 16, 8, 4, 2, 1)
"""Default sizes: the distinct blocks divided by these numbers."""


@dataclass(frozen=True)
class Point:
    """Result of one replay.

    Attributes:
        blocks: size of the pool.
        hit: share of all named blocks that would have been loaded.
        levels: the part of ``hit`` from each level, the pool first.
        written: blocks that each level was given.
        over_budget: blocks that each level did not get because its budget was used up.
        more: gain in ``hit`` if that level alone were larger, for each level.
        references_per_s: speed of the replay.
    """

    policy: str
    blocks: int
    hit: float
    levels: tuple[float, ...]
    written: tuple[int, ...]
    over_budget: tuple[int, ...]
    more: tuple[float, ...]
    references_per_s: float

    def json(self, block_bytes: float | None) -> dict[str, object]:
        """Returns the result as an object for JSON."""
        size = None if block_bytes is None else self.blocks * block_bytes
        return {**asdict(self), "bytes": size}


@dataclass(frozen=True)
class Sweep:
    """The settings to try on a trace."""

    policies: Sequence[str]
    sizes: Sequence[int]
    tiers: Sequence[Tier] = ()
    more_blocks: int = 0

    def points(self, trace: Trace) -> Iterator[Point]:
        """Yields the result for every size with every policy."""
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
            return Point(policy, blocks, part, (part,), (), (), (more,), references / seconds)
        levels = [{"capacity": blocks, "policy": policy}, *(tier.level() for tier in self.tiers)]
        found = json.loads(trace.replay(json.dumps(levels)))
        seconds = time.perf_counter() - begun
        more_of = []
        for index in range(len(levels)):
            if self.more_blocks and not (index or blocks):
                more_of.append(0.0)
            elif self.more_blocks:
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
            tuple(level["over_budget"] for level in found["levels"]),
            tuple(more_of),
            references / seconds,
        )


def usual_sizes(distinct: int) -> list[int]:
    """Returns sizes from a small part of all distinct blocks to all of them."""
    return sorted({max(1, distinct // part) for part in PARTS})
