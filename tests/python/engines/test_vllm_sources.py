"""Which tiers' hits vLLM's metrics count as hits on disk."""

import pytest

from kvdepot.engines.vllm.sources import all_on_this_node


@pytest.mark.parametrize(
    ("tiers", "on_this_node"),
    [
        (["Posix"], True),
        (["Slab", "Posix"], True),
        (["Dax"], True),
        (["Remote"], False),
        (["Posix", "Object"], False),
        (["Mooncake", "Posix"], False),
        ([], True),
    ],
)
def test_tiers_of_other_machines_are_not_on_this_node(tiers: list[str], on_this_node: bool) -> None:
    assert all_on_this_node(tiers) is on_this_node
