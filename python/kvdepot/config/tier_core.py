"""Each tier's settings as the core reads them: from explicit keys, and from the machine for keys that were left out."""

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
    """Value that the machine decides for a key that was left out.

    Attributes:
        key: name of the key.
        value: value in the key's own unit.
        told: value as the core reads it.
        may_change: whether the value may differ a moment later, as free space does.
    """

    key: str
    value: object
    told: object
    may_change: bool


def tiers_in_use(config: "KVDepotConfig") -> Iterator[Tier]:
    """Yields the pipeline's tiers that have keys for users, in the order of the documentation."""
    return (tier for tier in TIERS if tier.for_users and tier.name in config.tiers)


def decided(config: "KVDepotConfig", tier: Tier, machine: Machine, identity: bool = False) -> Iterator[Decided]:
    """Yields the values that the machine decides for a tier in use, except those that it cannot tell now.

    With ``identity``, no disk is asked, and values that may change are ``None``.
    """
    for _, key in tier.keyed:
        if key.by_machine is None or getattr(config, key.name) is not None:
            continue
        if key.by_machine.is_ == "cache_directory":
            place = (machine.cache_directory(),)
            yield Decided(key.name, place, list(place), may_change=False)
        elif key.by_machine.is_ == "interpreter":
            # Engines of several environments share one depot.
            interpreter = machine.interpreter()
            yield Decided(key.name, interpreter, interpreter, may_change=True)
        elif identity:
            yield Decided(key.name, None, None, may_change=True)
        else:
            share = _disk_share(config, tier, key.by_machine, machine)
            if share is not None:
                yield Decided(key.name, round(share / GIB, 3), share, may_change=True)


def tier_object(config: "KVDepotConfig", tier: Tier, machine: Machine, identity: bool) -> dict[str, object]:
    """Returns a tier's settings; with ``identity``, values that may change from one minute to the next are ``None``."""
    by_machine = {one.key: one for one in decided(config, tier, machine, identity)}
    settings: dict[str, object] = {}
    for setting, key in tier.keyed:
        value = getattr(config, key.name)
        one = by_machine.get(key.name)
        if identity and key.came_later and value == key.default:
            continue
        if one is None and value is None and _is_disk_share(key.by_machine):
            # The disk did not tell its size. The tier itself takes the same share when it opens.
            continue
        if one is not None:
            settings[setting.name] = None if identity and one.may_change else one.told
        elif setting.kind.is_ == "bytes":
            if value is not None:
                settings[setting.name] = int(value * GIB)
            elif identity:
                settings[setting.name] = None
        else:
            settings[setting.name] = list(value) if isinstance(value, tuple) else value
        if key.by_machine is not None and key.by_machine.tell:
            settings[key.by_machine.tell] = one is not None
    return settings


def _is_disk_share(by_machine: ByMachine | None) -> bool:
    return by_machine is not None and by_machine.is_ == "disk_share"


def _disk_share(config: "KVDepotConfig", tier: Tier, wanted: ByMachine, machine: Machine) -> int | None:
    paths: list[str] = []
    for setting, key in tier.keyed:
        if setting.kind.is_ == "paths":
            paths += getattr(config, key.name) or ()
    if paths:
        disk_bytes = machine.disk_bytes(paths)
        if disk_bytes is None:
            return None
        share = disk_bytes // 100 * wanted.percent
    else:
        share = machine.free_bytes(machine.cache_directory()) // 100 * wanted.free_percent
    # Less than a page would mean no cap.
    return max(share // BLOCK_ALIGN_BYTES, 1) * BLOCK_ALIGN_BYTES
