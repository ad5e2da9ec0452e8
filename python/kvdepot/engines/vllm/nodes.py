"""Engines whose ranks run on several nodes.

A rank dumps to its own node's depot and loads from it, and the scheduler looks the blocks of all ranks up in the depot
of its node. That has the other nodes' blocks only if a tier below brings them there.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvdepot.engines.vllm.groups import Geometry
from kvdepot.engines.vllm.log import connector_logger

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

logger = connector_logger()

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_node() -> str:
    """Returns what tells this machine from others, in all of its containers; empty if unknown."""
    try:
        return BOOT_ID.read_text("ascii").strip()
    except OSError:
        return ""


def within_reach(shape: Geometry, parallel_config: "ParallelConfig", *, shares_a_tier: bool) -> Geometry:
    """Returns the geometry, or a refusal if vLLM says that the ranks are on nodes that share no tier."""
    # vLLM counts the nodes of its own executor only. Where Ray puts the ranks, they report themselves.
    nodes = getattr(parallel_config, "nnodes_within_dp", 1)
    if shape.unsupported or nodes < 2 or shares_a_tier:
        return shape
    return replace(shape, groups=(), unsupported=_refusal(nodes))


def problem_of_nodes(ranks: Iterable[str], *, shares_a_tier: bool) -> str:
    """Returns why an engine is refused whose ranks have reported these nodes; empty if it is not, with a warning."""
    nodes = len({this_node(), *ranks} - {""})
    if nodes < 2:
        return ""
    if not shares_a_tier:
        return _refusal(nodes)
    logger.warning(
        "kvdepot: the engine's ranks and its scheduler run on %d nodes: a hit needs the blocks of every rank in a tier "
        "that all nodes share",
        nodes,
    )
    return ""


def _refusal(nodes: int) -> str:
    return (
        f"the engine's ranks and its scheduler run on {nodes} nodes, and the scheduler's depot never has the blocks of "
        "ranks on other nodes: run the engine on one node, or use a pipeline with a tier that all nodes share (Remote, "
        "Object, Mooncake, or Posix on a common mount)"
    )
