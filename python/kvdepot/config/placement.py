"""Keys for when a tier receives which blocks. Every tier has them, prefixed with its own name."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from kvdepot.config.keys import key
from kvdepot.config.problem import Problem
from kvdepot.config.sizes import GIB
from kvdepot.config.tier_table import Tier

if TYPE_CHECKING:
    from kvdepot.config.model import KVDepotConfig

WriteWhen = Literal["through", "on_second_use", "when_cold", "on_demotion"]
WRITE = (
    "When the depot writes a block to the `{tier}` tier. `through`: immediately; the pool keeps the block until it is "
    "written. `on_second_use`: when the block is used again. `when_cold`: before the pool evicts it; eviction does not "
    "wait for a failing or slow tier. `on_demotion`: before a tier above evicts it. When the depot shuts down, it "
    "loses blocks that it has handed to no tier."
)
WRITE_BUDGET = (
    "Daily write budget of the `{tier}` tier, for media that wear out; 0 = no limit. The budget refills continuously; "
    "at most one hour's share accumulates. The depot skips a block that exceeds it, and retries when the block is used "
    "again, if the pool still has it. Values from the network listener are written nevertheless, and use the budget up."
)
PROMOTE = "Also give the `{tier}` tier blocks that were read from a tier below it."


def placement_keys(tier: Tier) -> dict[str, Any]:
    """Returns the keys of a tier's placement as fields of a model."""
    return {
        f"{tier.section}_write": (WriteWhen, key("through", WRITE.format(tier=tier.name))),
        f"{tier.section}_promote": (bool, key(False, PROMOTE.format(tier=tier.name))),
        f"{tier.section}_write_gb_per_day": (
            float,
            key(0.0, WRITE_BUDGET.format(tier=tier.name), unit="GiB a day", ge=0, le=1e6),
        ),
    }


def placement_of(config: "KVDepotConfig", tier: str) -> dict[str, object]:
    """Returns a tier's placement as the core reads it; empty for the default."""
    name = tier.lower()
    said: dict[str, object] = {
        "write": getattr(config, f"{name}_write", "through"),
        "promote": getattr(config, f"{name}_promote", False),
    }
    if gb_per_day := getattr(config, f"{name}_write_gb_per_day", 0.0):
        said["write_bytes_per_day"] = max(1, int(gb_per_day * GIB))
    return {} if said == {"write": "through", "promote": False} else said


def placement_problems(config: "KVDepotConfig") -> Iterator[Problem]:
    """Yields the problems with the placements of a pipeline's tiers."""
    for position, tier in enumerate(config.tiers):
        name = tier.lower()
        if config.pool == "Staging" and getattr(config, f"{name}_write", "through") != "through":
            yield Problem(
                f"{name}_write",
                "a Staging pool keeps nothing that could be written later: write through, or use a Cache",
            )
        if getattr(config, f"{name}_write", "through") == "on_demotion" and position == 0:
            yield Problem(
                f"{name}_write",
                f"there is no tier above {tier} in {config.pipeline} that could evict blocks: use when_cold",
            )
        if getattr(config, f"{name}_promote", False) and position == len(config.tiers) - 1:
            yield Problem(f"{name}_promote", f"there is no tier below {tier} in {config.pipeline}: remove it")
