"""Rules between the keys of a tier, and between them and the pipeline, from the core's table."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvdepot.config.problem import Problem
from kvdepot.config.tier_keys import names_of
from kvdepot.config.tier_table import TIERS, Rule, Tier

if TYPE_CHECKING:
    from kvdepot.config.model import KVDepotConfig


def tier_problems(config: "KVDepotConfig") -> Iterator[Problem]:
    """Yields every problem of the tiers' keys beyond each key's own type and bounds."""
    for tier in TIERS:
        if tier.name in config.tiers:
            yield from _in_use(config, tier)
            continue
        for name in names_of(tier):
            if name in config.model_fields_set:
                text = f"has no use in the pipeline {config.pipeline}, which has no {tier.name} tier: remove it"
                yield Problem(name, text)


def _in_use(config: "KVDepotConfig", tier: Tier) -> Iterator[Problem]:
    for _, key in tier.keyed:
        if getattr(config, key.name) is None:
            if key.required:
                yield Problem("pipeline", key.required)
        elif key.rule is not None and _is_broken(config, key.rule):
            yield Problem(key.name, key.rule.text)


def _is_broken(config: "KVDepotConfig", rule: Rule) -> bool:
    other: object = getattr(config, rule.key)
    if rule.is_ == "needs":
        return other is None
    if rule.is_ == "scheme":
        return str(other).partition("://")[0] not in rule.of
    return other == rule.value
