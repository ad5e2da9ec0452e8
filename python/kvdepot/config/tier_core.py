"""What the core is told of each tier: the keys that were said, and what the machine decides of those that were not."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.config.machine import Machine
from kvdepot.config.sizes import BLOCK_ALIGN_BYTES, GIB
from kvdepot.config.tier_table import TIERS, ByMachine, Tier

if TYPE_CHECKING:
    from kvdepot.config.model import KVDepotConfig


@dataclass(frozen=True)
class Decided:
    """A key that was left out, as the machine decides it.

    Attributes:
        key: its name.
        value: in the key's own unit.
        told: as the core is told it.
        may_change: whether another moment could decide otherwise, as with free space.
    """

    key: str
    value: object
    told: object
    may_change: bool


def tiers_in_use(config: "KVDepotConfig") -> Iterator[Tier]:
    """The pipeline's tiers that users have keys for, in the order of the documentation."""
    return (tier for tier in TIERS if tier.for_users and tier.name in config.tiers)


def decided(config: "KVDepotConfig", tier: Tier, machine: Machine) -> Iterator[Decided]:
    """What the machine decides of a tier in use."""
    for _, key in tier.keyed:
        if key.by_machine is None or getattr(config, key.name) is not None:
            continue
        if key.by_machine.is_ == "cache_directory":
            place = (machine.cache_directory(),)
            yield Decided(key.name, place, list(place), may_change=False)
        else:
            share = _disk_share(config, tier, key.by_machine, machine)
            yield Decided(key.name, round(share / GIB, 3), share, may_change=True)


def tier_object(config: "KVDepotConfig", tier: Tier, machine: Machine, identity: bool) -> dict[str, object]:
    """A tier's settings; with ``identity`` without what may change from one minute to the next."""
    by_machine = {one.key: one for one in decided(config, tier, machine)}
    settings: dict[str, object] = {}
    for setting, key in tier.keyed:
        value = getattr(config, key.name)
        one = by_machine.get(key.name)
        if one is not None:
            settings[setting.name] = None if identity and one.may_change else one.told
        elif setting.kind.is_ == "bytes":
            settings[setting.name] = None if value is None else int(value * GIB)
        else:
            settings[setting.name] = list(value) if isinstance(value, tuple) else value
        if key.by_machine is not None and key.by_machine.tell:
            settings[key.by_machine.tell] = one is not None
    return settings


def _disk_share(config: "KVDepotConfig", tier: Tier, wanted: ByMachine, machine: Machine) -> int:
    paths: list[str] = []
    for setting, key in tier.keyed:
        if setting.kind.is_ == "paths":
            paths += getattr(config, key.name) or ()
    if paths:
        share = machine.disk_bytes(paths) // 100 * wanted.percent
    else:
        share = machine.free_bytes(machine.cache_directory()) // 100 * wanted.free_percent
    # Less than a page would read as no cap.
    return max(share // BLOCK_ALIGN_BYTES, 1) * BLOCK_ALIGN_BYTES
