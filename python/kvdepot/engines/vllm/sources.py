"""Where vLLM's metrics say that a hit came from, if not from the depot's pool."""

from collections.abc import Sequence

ON_THIS_NODE = frozenset({"Dax", "Posix", "Slab"})
"""Tiers whose blocks are on a disk or in memory of this node, or on a mount of it."""


def source_below_the_pool(tiers: Sequence[str]) -> str:
    """Returns the name of vLLM's ``CacheHitSource`` for hits from the tiers of a pipeline.

    The depot does not tell which of its tiers had a block. So it is ``DISK`` only if no tier is on another machine.
    """
    return "DISK" if ON_THIS_NODE.issuperset(tiers) else "EXTERNAL_UNSPECIFIED"
