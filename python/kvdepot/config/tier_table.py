"""The tiers of the Rust core and what each can be told: the core's own table, which nothing else reads.

Keys of a configuration, their checks, their documentation and what the core is told follow from it. A tier is added in
Rust (``crates/kvdepot-tier``) and nowhere in Python.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kvdepot._native import tier_table


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Kind(_Row):
    """What a setting may be; see ``Kind`` in ``crates/kvdepot-tier/src/settings.rs``."""

    is_: Literal["bool", "switch", "whole", "bytes", "choice", "text", "path", "url", "paths", "servers"] = Field(
        alias="is"
    )
    min: int = 0
    max: int = 0
    of: tuple[str, ...] = ()


class ByMachine(_Row):
    """How the machine decides the value of a key that is left out."""

    is_: Literal["cache_directory", "disk_share"] = Field(alias="is")
    tell: str = ""
    percent: int = 0
    free_percent: int = 0


class Rule(_Row):
    """How a key depends on another one of its tier."""

    is_: Literal["needs", "not"] = Field(alias="is")
    key: str
    value: str = ""
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


class TierSetting(_Row):
    """A setting as the tier reads it, and the key that says it, if users have one."""

    name: str
    kind: Kind
    key: TierKey | None


class Tier(_Row):
    """A tier.

    Attributes:
        name: as a pipeline names it.
        section: its name in what the core is told, and before the keys of its placement.
        for_users: whether users have keys for it; not so what only measures or tests.
        settings: what it can be told, in the order of the documentation.
    """

    name: str
    section: str
    for_users: bool
    settings: tuple[TierSetting, ...]

    @property
    def keyed(self) -> tuple[tuple[TierSetting, TierKey], ...]:
        """The settings that users have a key for."""
        return tuple((setting, setting.key) for setting in self.settings if setting.key is not None)


class _Table(_Row):
    tiers: tuple[Tier, ...]
    later: tuple[str, ...]


_TABLE = _Table.model_validate_json(tier_table())
TIERS = _TABLE.tiers
LATER = _TABLE.later
"""Names that a pipeline may have in a later version."""
