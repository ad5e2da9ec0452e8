"""Hits are counted by vLLM's own names of sources."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvdepot.engines.vllm.connector import KVDepotConnector


@pytest.mark.parametrize(
    ("tiers_are_local", "below"), [(True, CacheHitSource.DISK), (False, CacheHitSource.EXTERNAL_UNSPECIFIED)]
)
def test_hits_below_the_pool_are_disk_only_if_every_tier_is_on_this_node(
    tiers_are_local: bool, below: CacheHitSource
) -> None:
    connector: Any = KVDepotConnector.__new__(KVDepotConnector)
    connector._scheduler = SimpleNamespace(hit_tier_tokens=lambda request: 48)
    connector._tiers_are_local = tiers_are_local
    sources = connector.get_external_cache_hit_sources
    request = SimpleNamespace()
    assert sources(request, 80) == {CacheHitSource.HOST: 32, below: 48}
    assert sources(request, 32) == {below: 32}, "vLLM took fewer tokens than the depot had"
