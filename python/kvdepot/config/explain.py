"""The effective value of each key, and its origin."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.config import core
from kvdepot.config.environment import LOG_BOUNDS, log_bound, log_level
from kvdepot.config.machine import Machine
from kvdepot.config.sizes import GIB
from kvdepot.config.tier_core import decided as tier_decided
from kvdepot.config.tier_core import tiers_in_use

if TYPE_CHECKING:
    from kvdepot.config.model import KVDepotConfig

DEFAULT = "default"
MACHINE = "machine"


@dataclass(frozen=True)
class Setting:
    """A key's effective value.

    Attributes:
        key: name in our own spelling.
        value: the effective value; ``None`` = none, or decided by the caller.
        unit: unit of ``value``; empty for names and switches.
        origin: ``default``, ``machine``, ``path:line``, ``argument`` or ``environment VARIABLE``.
    """

    key: str
    value: object
    unit: str
    origin: str


def effective(config: "KVDepotConfig", machine: Machine) -> tuple[Setting, ...]:
    """Returns every key's setting, in the order of the table of keys."""
    decided = _decided(config, machine)
    settings = []
    for key in type(config).key_table():
        value = getattr(config, key.name)
        origin = config.origins.get(key.name, "argument" if key.name in config.model_fields_set else DEFAULT)
        if key.name in decided:
            value, origin = decided[key.name]
        settings.append(Setting(key.name, value, key.facts.unit, origin))
    return tuple(settings)


def _decided(config: "KVDepotConfig", machine: Machine) -> dict[str, tuple[object, str]]:
    """Returns the keys whose value is not the configuration's own: sized to the machine or set by the environment."""
    decided: dict[str, tuple[object, str]] = {}
    if config.pool_gb is None and config.pool != "Staging":
        size = core.pool_size(config, None, machine)
        decided["pool_gb"] = (round(size.bytes / GIB, 3), MACHINE if size.from_machine else DEFAULT)
    if config.pool == "Staging" and config.pool_gb is None and config.pool_slots is None:
        decided["pool_slots"] = (core.POOL_SLOTS_DEFAULT, DEFAULT)
    for tier in tiers_in_use(config):
        for one in tier_decided(config, tier, machine):
            decided[one.key] = (one.value, MACHINE)
    level, variable = log_level(config.log_level, machine.environ)
    if variable:
        decided["log_level"] = (level, f"environment {variable}")
    for key in LOG_BOUNDS:
        bound, variable = log_bound(key, getattr(config, key), machine.environ)
        if variable:
            decided[key] = (bound, f"environment {variable}")
    return decided
