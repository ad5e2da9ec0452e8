"""kvdepot's settings in LMCache's configuration: the depot's own keys, and those of LMCache's DAX backend."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvdepot.config import KVDepotConfig, load_engine_config
from kvdepot.config.engine_options import FILE_KEY, name_of
from kvdepot.config.tier_table import TIERS
from kvdepot.engines.lmcache.counters import lmcache_logger
from kvdepot.errors import ConfigError

VERSION_KEY = "weights_version"
OWN_PREFIX = "kvdepot."
DAX_PREFIX = "dax."
DAX_KEYS = (
    "device_path",
    "max_dax_size",
    "async_put",
    "restore_workers",
    "restore_max_regions",
    "retrieve_staging_slab_bytes",
)
"""Keys of LMCache's DAX backend."""
DAX_TIER = "Dax"


@dataclass(frozen=True)
class Options:
    """Configuration of one adapter or backend.

    Attributes:
        config: keys of the depot and of its client.
        weights_version: the user's name for the weights, which LMCache's keys do not distinguish.
    """

    config: KVDepotConfig
    weights_version: str = ""


def read_params(params: Mapping[str, Any] | None) -> Options:
    """Reads ``adapter_params`` of ``--l2-adapter``: the name of a file, keys of the configuration, or nothing.

    Raises:
        ConfigError: a key or value is wrong.
    """
    said = dict(params or {})
    version = name_of(said.pop(VERSION_KEY, ""), VERSION_KEY)
    config = load_engine_config(said)
    if config.mode == "embedded":
        raise ConfigError("mode: embedded: stores of several layouts share a depot: write node, or remove the key")
    return Options(config.model_copy(update={"mode": "node"}), version)


def read_extra_config(extra_config: Mapping[str, Any] | None) -> Options:
    """Reads LMCache's ``extra_config``: ``kvdepot.config`` (a file), ``kvdepot.KEY``, and keys of its DAX backend.

    Keys of LMCache's DAX backend configure the depot's Dax tier, unless a pipeline without one is set. Other keys are
    LMCache's own, or another plug-in's.

    Raises:
        ConfigError: a key or value is wrong.
    """
    extra = extra_config or {}
    own = {name.removeprefix(OWN_PREFIX): value for name, value in extra.items() if name.startswith(OWN_PREFIX)}
    dax = {name.removeprefix(DAX_PREFIX): value for name, value in extra.items() if name.startswith(DAX_PREFIX)}
    if not dax:
        return read_params(own)
    if unknown := sorted(set(dax) - set(DAX_KEYS)):
        raise ConfigError(f"{DAX_PREFIX}{unknown[0]}: not a key of LMCache's DAX backend: remove it")
    pipeline = str(own.get("pipeline", f"Cache|{DAX_TIER}"))
    if FILE_KEY in own or DAX_TIER not in pipeline.split("|"):
        said = OWN_PREFIX + (FILE_KEY if FILE_KEY in own else "pipeline")
        names = ", ".join(DAX_PREFIX + name for name in dax)
        lmcache_logger().warning("kvdepot: ignored, because %s determines the tiers: %s", said, names)
        return read_params(own)
    return read_params({"pipeline": pipeline, **_tier_keys(dax), **own})


def _tier_keys(dax: Mapping[str, Any]) -> dict[str, Any]:
    """Translates these keys into the Dax tier's own names, by its table."""
    tier = next((one for one in TIERS if one.name == DAX_TIER), None)
    if tier is None:
        names = ", ".join(DAX_PREFIX + name for name in dax)
        raise ConfigError(f"{names}: this build has no Dax tier: set {OWN_PREFIX}pipeline, for example to Cache|Posix")
    ours = {theirs: setting.key.name for setting in tier.settings if setting.key for theirs in setting.key.seeds}
    if strange := [DAX_PREFIX + name for name in dax if DAX_PREFIX + name not in ours]:
        raise ConfigError(f"{strange[0]}: the Dax tier has no such key: remove it")
    return {ours[DAX_PREFIX + name]: value for name, value in dax.items()}
