"""The tiers of the Rust core and their settings, from the core's own table. Only this module reads that table.

Configuration keys, their checks, their documentation and the core's input follow from it. A tier is added in Rust
(``crates/kvdepot-tier``), without any change in Python.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kvdepot._native import tier_table


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Kind(_Row):
    """Type and range of a setting; see ``Kind`` in ``crates/kvdepot-tier/src/settings.rs``."""

    is_: Literal["bool", "switch", "whole", "bytes", "choice", "text", "path", "url", "paths", "servers"] = Field(
        alias="is"
    )
    min: int = 0
    max: int = 0
    of: tuple[str, ...] = ()
    with_name: tuple[str, ...] = ()


class ByMachine(_Row):
    """How the machine decides the value of a key that was left out."""

    is_: Literal["cache_directory", "interpreter", "disk_share"] = Field(alias="is")
    tell: str = ""
    percent: int = 0
    free_percent: int = 0


class Rule(_Row):
    """How a key depends on another key of its tier."""

    is_: Literal["needs", "not", "scheme"] = Field(alias="is")
    key: str
    value: str = ""
    of: tuple[str, ...] = ()
    text: str


class TierKey(_Row):
    """A key of a user's configuration."""

    name: str
    meaning: str
    unit: str
    default: bool | int | str | None
    by_default: str
    by_machine: ByMachine | None
    example: str
    seeds: tuple[str, ...]
    half_of_seed: str
    only: tuple[str, ...]
    instead: str
    required: str
    rule: Rule | None
    came_later: bool


class TierSetting(_Row):
    """A setting as the tier reads it, and the key that sets it, if users have one."""

    name: str
    kind: Kind
    key: TierKey | None


class Tier(_Row):
    """A tier.

    Attributes:
        name: name in a pipeline.
        section: name in the core's input, and prefix of its placement keys.
        for_users: whether users have keys for it; false for tiers that only serve measurements or tests.
        settings: its settings, in the order of the documentation.
    """

    name: str
    section: str
    for_users: bool
    settings: tuple[TierSetting, ...]

    @property
    def keyed(self) -> tuple[tuple[TierSetting, TierKey], ...]:
        """Settings that users have a key for."""
        return tuple((setting, setting.key) for setting in self.settings if setting.key is not None)


class _Table(_Row):
    tiers: tuple[Tier, ...]
    later: tuple[str, ...]


_TABLE = _Table.model_validate_json(tier_table())
TIERS = _TABLE.tiers
LATER = _TABLE.later
"""Names of tiers that a later version may have."""
