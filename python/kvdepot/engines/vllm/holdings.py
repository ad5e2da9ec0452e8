"""A rank's part of a KV-cache group: its whole pages, or the slices of KV heads that they consist of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.engines.vllm.facts import group_facts, slice_facts
from kvdepot.engines.vllm.groups import Group
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.options import ConnectorOptions
from kvdepot.engines.vllm.pages import group_pages
from kvdepot.engines.vllm.ranks import Rank, attention_backends, tensor_rank
from kvdepot.engines.vllm.shares import Share
from kvdepot.engines.vllm.slices import WholeError, same_on_all_ranks, slice_pages, slices_of
from kvdepot.engines.vllm.stores import Stored

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

logger = connector_logger()


@dataclass(frozen=True)
class Holding:
    """A group on this rank.

    Attributes:
        stored: content, by namespace.
        share: the rank's share of the dumps.
        first: whether it has the first slice of a token's KV.
    """

    stored: tuple[Stored, ...]
    share: Share
    first: bool


def holding_of(
    vllm_config: "VllmConfig",
    facts: dict[str, object],
    group: Group,
    kv_caches: Mapping[str, "torch.Tensor"],
    page_count: int,
    rank: Rank,
    options: ConnectorOptions,
) -> Holding | None:
    """Returns a group as this rank holds it; ``None`` if the rank has no layer of it.

    Args:
        vllm_config: the engine's configuration.
        facts: facts shared by all groups and ranks.
        group: the group.
        kv_caches: tensors by layer.
        page_count: number of blocks of the cache.
        rank: this worker's position.
        options: determine whether blocks are stored by slices.

    Raises:
        ValueError: the pages cannot be copied.
    """
    if not group.layer_names:
        return None
    if options.kv_head_slices and not same_on_all_ranks(group.spec):
        try:
            return _in_slices(vllm_config, facts, group, kv_caches, page_count, options)
        except WholeError as why:
            logger.warning(
                "kvdepot: group %d is stored by rank, although kv_head_slices is %d; engines with another number of "
                "ranks do not find it: %s",
                group.index,
                options.kv_head_slices,
                why,
            )
    pages = group_pages(group.layer_names, kv_caches, page_count, options.use_layerwise)
    text = group_facts(facts, group, pages, rank, attention_backends(vllm_config, pages.layer_names))
    return Holding((Stored(text, pages),), rank.share, rank.kv_shard == 0 and rank.dcp_rank == 0)


def _in_slices(
    vllm_config: "VllmConfig",
    facts: dict[str, object],
    group: Group,
    kv_caches: Mapping[str, "torch.Tensor"],
    page_count: int,
    options: ConnectorOptions,
) -> Holding:
    slices = slices_of(vllm_config, group.spec, options.kv_head_slices, tensor_rank())
    stored = []
    for number, heads in slices.parts():
        pages = slice_pages(group.layer_names, kv_caches, page_count, options.use_layerwise, slices.rank_heads, heads)
        backend = attention_backends(vllm_config, pages.layer_names)
        stored.append(Stored(slice_facts(facts, group, pages, slices, number, backend), pages, heads))
    return Holding(tuple(stored), Share(slices.replica, slices.replicas), slices.first == 0)
