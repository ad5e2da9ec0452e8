"""The options in an entry of vLLM's ``secondary_tiers``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvdepot.config import KVDepotConfig, load_engine_config
from kvdepot.config.engine_options import name_of
from kvdepot.errors import ConfigError

VERSION_KEY = "weights_version"
ADAPTERS_KEY = "adapters_version"
RESET_KEY = "on_reset"
LOCALITY_KEY = "locality"
RESETS = ("apart", "keep")
LOCALITIES = ("LOCAL", "REMOTE")


@dataclass(frozen=True)
class Options:
    """Configuration of one tier.

    Attributes:
        config: keys of the depot and of its client.
        weights_version: the user's name for the weights, in addition to the digest of their files.
        adapters_version: the user's name for the contents of all LoRA adapters, which vLLM's keys leave out.
        on_reset: effect of a reset of vLLM's offloaded cache: ``apart`` = switch to a namespace of its own, ``keep`` =
            none.
        locality: how the tier matches requests that choose their tiers; ``None`` = matches both.
    """

    config: KVDepotConfig
    weights_version: str = ""
    adapters_version: str = ""
    on_reset: Literal["apart", "keep"] = "apart"
    locality: str | None = None


def read_options(tier_config: Mapping[str, Any]) -> Options:
    """Reads the keys of a tier, without vLLM's own: the name of a file (``config``), or configuration keys.

    Raises:
        ConfigError: a key or value is wrong.
    """
    said = dict(tier_config)
    version, adapters = (name_of(said.pop(key, ""), key) for key in (VERSION_KEY, ADAPTERS_KEY))
    reset = said.pop(RESET_KEY, "apart")
    if reset not in RESETS:
        raise ConfigError(f"{RESET_KEY}: must be one of {', '.join(RESETS)}, got {reset!r}")
    locality = said.pop(LOCALITY_KEY, None)
    if locality is not None and locality not in LOCALITIES:
        raise ConfigError(f"{LOCALITY_KEY}: must be one of {', '.join(LOCALITIES)}, got {locality!r}")
    config = load_engine_config(said)
    if config.mode == "embedded":
        raise ConfigError("mode: embedded: the engines of a node share a depot: write node, or remove the key")
    if config.use_lite:
        raise ConfigError("use_lite: true: the tier has no lite mode: remove the key, or use KVDepotConnector")
    if config.pool == "Staging":
        raise ConfigError(f"pipeline: {config.pipeline}: the tier needs a pool that keeps blocks: begin it with Cache")
    return Options(config.model_copy(update={"mode": "node"}), version, adapters, reset, locality)
