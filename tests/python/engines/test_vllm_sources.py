"""Where vLLM's metrics say that hits came from."""

import pytest

from kvdepot.engines.vllm.sources import source_below_the_pool


@pytest.mark.parametrize(
    ("tiers", "source"),
    [
        (["Posix"], "DISK"),
        (["Slab", "Posix"], "DISK"),
        (["Dax"], "DISK"),
        (["Remote"], "EXTERNAL_UNSPECIFIED"),
        (["Posix", "Object"], "EXTERNAL_UNSPECIFIED"),
        (["Mooncake", "Posix"], "EXTERNAL_UNSPECIFIED"),
        ([], "DISK"),
    ],
)
def test_hits_of_other_machines_are_not_called_disk(tiers: list[str], source: str) -> None:
    assert source_below_the_pool(tiers) == source
