"""Our keys in SGLang's extra configuration of a storage backend or linker."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvdepot.config import KVDepotConfig, load_engine_config
from kvdepot.config.engine_options import name_of
from kvdepot.errors import ConfigError

VERSION_KEY = "weights_version"
SALT_KEY = "salt"
ZERO_COPY_KEY = "interface_v1"
SGLANG_KEYS = (
    "backend_name",
    "module_path",
    "class_name",
    ZERO_COPY_KEY,
    "allocator",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
)
"""Keys that SGLang reads itself; which of them it leaves in differs between releases."""


@dataclass(frozen=True)
class Options:
    """Configuration of one backend or linker.

    Attributes:
        config: keys of the depot and of its client.
        weights_version: the user's name for the weights, in addition to the digest of their files.
        salt: name that separates this engine's blocks from those of engines with another salt.
    """

    config: KVDepotConfig
    weights_version: str = ""
    salt: str = ""


def read_extra_config(extra_config: Mapping[str, Any] | None) -> Options:
    """Reads ``extra_config``: the name of a file (``config``), or keys of the configuration next to SGLang's own.

    Raises:
        ConfigError: a key or value is wrong, or zero-copy is disabled (``interface_v1``), so SGLang would copy each
            page an additional time.
    """
    given = {name: value for name, value in (extra_config or {}).items() if name not in SGLANG_KEYS}
    if not (extra_config or {}).get(ZERO_COPY_KEY):
        raise ConfigError(f'{ZERO_COPY_KEY}: must be 1: write "{ZERO_COPY_KEY}": 1 into the extra config')
    return _options(given)


def read_linker_config(extra_config: Mapping[str, Any] | None) -> Options:
    """Reads ``linker_extra_config``: the name of a file (``config``), or keys of the configuration.

    Raises:
        ConfigError: a key or value is wrong.
    """
    return _options(dict(extra_config or {}))


def _options(given: dict[str, Any]) -> Options:
    version, salt = (name_of(given.pop(key, ""), key) for key in (VERSION_KEY, SALT_KEY))
    config = load_engine_config(given)
    if config.mode == "embedded":
        raise ConfigError("mode: embedded: the ranks of an engine share a depot: write node, or remove the key")
    if not config.share_depot and config.socket is None:
        raise ConfigError("share_depot: false: SGLang's ranks have no name in common: write socket: PATH instead")
    if config.pool == "Staging":
        raise ConfigError(f"pipeline: {config.pipeline}: SGLang needs a pool that keeps blocks: begin it with Cache")
    return Options(config.model_copy(update={"mode": "node"}), version, salt)
