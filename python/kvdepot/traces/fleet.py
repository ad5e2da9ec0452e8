"""Simulations of a fleet: nodes with engines and a depot each, a router, and pool servers that the nodes share."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvdepot._native import Trace
from kvdepot.errors import ConfigError
from kvdepot.traces.sizes import Tier

ROUTES = ("random", "round_robin", "longest_prefix")
"""How a router chooses a node."""
_AT = re.compile(r"(\d+)@(\d+(?:\.\d+)?)%?")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)%?")

Change = tuple[float, dict[str, int]]
"""Share of the requests after which something happens, its name, and the number of the node, server or tenant."""


@dataclass(frozen=True)
class Part:
    """Result of one part of the trace.

    Attributes:
        references: blocks named by its requests.
        hits: blocks of hits in the pools, in each own tier, and on the pool servers.
        written: blocks stored in each of these.
        engine_hits: blocks of hits that engines had in their own caches.
        busiest: requests of the node with the most, divided by the mean of all nodes.
        nodes: nodes that serve requests at its end.
    """

    references: int
    hits: tuple[int, ...]
    written: tuple[int, ...]
    engine_hits: int
    busiest: float
    nodes: int

    @property
    def hit(self) -> float:
        """Share of the named blocks that an engine would have had, or loaded."""
        return (self.engine_hits + sum(self.hits)) / max(1, self.references)


@dataclass(frozen=True)
class Fleet:
    """A fleet to simulate.

    Attributes:
        nodes: number of nodes at the start.
        pool: size of each node's pool, in blocks.
        policy: eviction policy of the pools.
        tiers: each node's own tiers.
        engines: number of engines on each node.
        engine_capacity: blocks in each engine's own prefix cache; with 0, an engine asks the depot for every block.
        servers: number of pool servers.
        shared: the tier that these make up; its size is that of one server. ``None`` = no servers.
        copies: how often each request is sent, each time with blocks of its own.
        changes: what happens, and when, in order.
        windows: number of parts of the trace.
        seed: determines random routes.
    """

    nodes: int
    pool: int
    policy: str
    tiers: Sequence[Tier] = ()
    engines: int = 1
    engine_capacity: int = 0
    servers: int = 0
    shared: Tier | None = None
    copies: int = 1
    changes: Sequence[Change] = field(default_factory=list)
    windows: int = 20
    seed: int = 0

    def simulate(self, trace: Trace, route: str) -> list[Part]:
        """Returns the result of each part of the trace.

        Raises:
            ConfigError: the fleet has no such node, server or tenant, or a number is too large.
        """
        wanted = {
            "nodes": self.nodes,
            "engines": self.engines,
            "engine_capacity": self.engine_capacity,
            "levels": [{"capacity": self.pool, "policy": self.policy}, *(tier.level() for tier in self.tiers)],
            "servers": self.servers,
            "shared": self.shared.level() if self.shared else None,
            "route": route,
            "copies": self.copies,
            "changes": self.changes,
            "windows": self.windows,
            "seed": self.seed,
        }
        found = json.loads(trace.fleet(json.dumps(wanted)))
        mean = trace.counts()[0] * self.copies / max(1, len(found))
        return [
            Part(
                window["references"],
                tuple(level["hits"] for level in window["levels"]),
                tuple(level["written"] for level in window["levels"]),
                window["engine_hits"],
                window["requests_max"] * window["nodes"] / max(1.0, mean),
                window["nodes"],
            )
            for window in found
        ]


def together(parts: Sequence[Part]) -> Part:
    """Returns the result of all parts; the busiest node is that of the part in which it was the busiest."""
    sums = [tuple(map(sum, zip(*(getattr(part, name) for part in parts), strict=True))) for name in ("hits", "written")]
    references, engine_hits = (sum(getattr(part, name) for part in parts) for name in ("references", "engine_hits"))
    return Part(references, sums[0], sums[1], engine_hits, max(part.busiest for part in parts), parts[-1].nodes)


def change_at(name: str, text: str) -> Change:
    """Parses ``NUMBER@PERCENT``: what happens to this node, server or tenant, after this share of the requests.

    Raises:
        ConfigError: it is something else.
    """
    found = _AT.fullmatch(text.strip())
    if found is None or float(found[2]) > 100:
        option = name.replace("_", "-")
        raise ConfigError(f"--{option} {text!r}: write NUMBER@PERCENT, such as 3@50 for number 3 at half time")
    return float(found[2]) / 100, {name: int(found[1])}


def upgrades(text: str, nodes: int, *, takes_over: bool) -> Iterator[Change]:
    """Yields one upgrade of every node, evenly between two moments: ``FROM-TO`` in percent of the requests.

    Raises:
        ConfigError: it is something else.
    """
    found = _SPAN.fullmatch(text.strip())
    begin, end = (float(found[1]) / 100, float(found[2]) / 100) if found else (1.0, 0.0)
    if not begin <= end <= 1:
        raise ConfigError(f"--upgrade {text!r}: write FROM-TO in percent of the requests, such as 25-75")
    for node in range(nodes):
        yield begin + (end - begin) * node / nodes, {"take_over" if takes_over else "upgrade": node}
