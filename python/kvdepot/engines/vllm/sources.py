"""Where a tier keeps its blocks, for vLLM's metrics of hits."""

from collections.abc import Sequence

ON_THIS_NODE = frozenset({"Dax", "Posix", "Slab"})
"""Tiers whose blocks are on a disk or in memory of this node, or on a mount of it."""


def all_on_this_node(tiers: Sequence[str]) -> bool:
    """Returns whether no tier of a pipeline is on another machine: the depot does not tell which tier had a block."""
    return ON_THIS_NODE.issuperset(tiers)
