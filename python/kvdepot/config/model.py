"""The configuration, typed and checked: ``KVDepotConfig``."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import ConfigDict, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from kvdepot.config import core, environment, explain, socket_path
from kvdepot.config.depot_keys import DepotKeys
from kvdepot.config.engine_keys import EngineKeys
from kvdepot.config.keys import Key, key_of_field
from kvdepot.config.machine import Machine
from kvdepot.config.pipeline import split_pipeline
from kvdepot.config.rules import problems
from kvdepot.config.tier_keys import TierKeys, names_of
from kvdepot.config.tier_table import TIERS

SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Depot and pool", tuple(DepotKeys.model_fields)),
    *((f"{tier.name} tier", names_of(tier)) for tier in TIERS if tier.for_users),
    ("Engine", tuple(EngineKeys.model_fields)),
)
"""Titles of the sections of the table of keys, each with the names of its keys."""


class KVDepotConfig(EngineKeys, TierKeys, DepotKeys):
    """A complete configuration: immutable, checked, equal for equal meaning whichever spelling it was read from.

    Read one with ``kvdepot.config.load_config``. Sizes end in ``_gb`` and count GiB (2^30 bytes), times end in
    ``_ms`` or ``_s``. For a value of ``None``, the machine or the caller decides when it is needed.

    Raises:
        pydantic.ValidationError: constructed directly from wrong values; ``load_config`` raises ``ConfigError``
        instead.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        found = tuple(problems(self))
        if found:
            text = "; ".join(f"{problem.key}: {problem.text}" for problem in found)
            raise PydanticCustomError("rules", "{text}", {"text": text, "problems": found})
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVDepotConfig):
            return NotImplemented
        return self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(tuple(self.model_dump().values()))

    @classmethod
    @cache
    def key_table(cls) -> tuple[Key, ...]:
        """The table of all keys, in the order of the documentation."""
        return tuple(key_of_field(name, field) for name, field in cls.model_fields.items())

    @property
    def pool(self) -> str:
        """First word of the pipeline: ``Cache`` or ``Staging``."""
        return split_pipeline(self.pipeline)[0]

    @property
    def tiers(self) -> tuple[str, ...]:
        """The words of the pipeline after the pool, nearest tier first."""
        return split_pipeline(self.pipeline)[1]

    @property
    def origins(self) -> Mapping[str, str]:
        """Origin of each key that was set: ``path:line``, ``argument`` or ``environment VARIABLE``."""
        return self._origins

    def with_origins(self, origins: Mapping[str, str]) -> "KVDepotConfig":
        """Returns a copy with the given origins of its keys."""
        copy = self.model_copy()
        copy._origins = dict(origins)  # noqa: SLF001 - its own class
        return copy

    def with_values(self, **values: Any) -> "KVDepotConfig":
        """Returns a copy with other values, checked again as a whole; ``None`` restores the default.

        Raises:
            pydantic.ValidationError: the result is not a valid configuration.
        """
        said = {name: getattr(self, name) for name in self.model_fields_set} | values
        copy = type(self)(**{name: value for name, value in said.items() if value is not None})
        origins = {**self._origins, **dict.fromkeys(values, "argument")}
        return copy.with_origins({name: origin for name, origin in origins.items() if name in copy.model_fields_set})

    def pool_bytes(self, block_bytes: int | None = None, machine: Machine | None = None) -> int:
        """Returns the size of the pool in bytes; see ``to_core_json`` for the arguments and errors."""
        return core.pool_size(self, block_bytes, machine or Machine.here()).bytes

    def to_core_json(self, block_bytes: int | None = None, machine: Machine | None = None) -> str:
        """Returns the JSON object that the Rust core reads, with keys in a fixed order and every size in bytes.

        Args:
            block_bytes: bytes of the engine's block; required if the pool is sized in blocks (``Staging`` without
                ``pool_gb``), otherwise unused.
            machine: machine that defaults are sized to; this machine when left out.

        Raises:
            ConfigError: the pool is larger than the machine's memory, or ``block_bytes`` is required and missing.
        """
        return core.core_json(self, block_bytes, machine or Machine.here())

    def socket_path(self, block_bytes: int | None = None, suffix: str | None = None) -> str:
        """Returns the path of the node depot's socket, which all engines with the same configuration share.

        Args:
            block_bytes: as for ``to_core_json``.
            suffix: distinguishes this engine from others (its engine id); required if ``share_depot`` is false, else
                ignored, because the depot is shared.

        Raises:
            ConfigError: ``suffix`` is required and missing, or the runtime directory is not safely the user's own.
        """
        return socket_path.socket_path(self, block_bytes, suffix, Machine.here())

    def depot_command(self, socket: str, block_bytes: int | None = None) -> list[str] | None:
        """Returns the command that starts this configuration's depot on ``socket``, for ``Depot.connect`` to spawn.

        ``None`` with ``start_depot: false``: the depot is started elsewhere.
        """
        return core.depot_command(self, socket, block_bytes, Machine.here()) if self.start_depot else None

    def copy_json(self, cuda_device: int | None = None) -> str:
        """Returns the JSON that selects the copy engine: the argument of ``Depot.store``.

        Args:
            cuda_device: number of the CUDA device that holds the engine's memory; ``None`` = host memory.
        """
        return core.copy_json(self, cuda_device, Machine.here())

    def log_settings(self) -> environment.LogSettings:
        """Returns how the core writes its log: the keys ``log_…``, unless environment variables override them.

        Raises:
            ConfigError: an environment variable has an invalid value.
        """
        return environment.log_settings(self, Machine.here().environ)

    def effective(self, machine: Machine | None = None) -> tuple[explain.Setting, ...]:
        """Returns every key with its effective value on this machine and the value's origin."""
        return explain.effective(self, machine or Machine.here())
