"""Configuration: one typed model, read from YAML in our own spelling or that of the seeds.

``load_config`` reads and checks a configuration, ``load_engine_config`` one among the options of an engine;
``KVDepotConfig`` is the model that all other code takes.
``KVDepotConfig.key_table()`` is the table of all keys, from which ``docs/configuration.md`` is generated.
"""

from kvdepot.config.engine_options import load_engine_config
from kvdepot.config.explain import Setting
from kvdepot.config.keys import Key, KeyFacts
from kvdepot.config.loader import ConfigSource, load_config
from kvdepot.config.machine import Machine
from kvdepot.config.model import SECTIONS, KVDepotConfig

__all__ = [
    "SECTIONS",
    "ConfigSource",
    "KVDepotConfig",
    "Key",
    "KeyFacts",
    "Machine",
    "Setting",
    "load_config",
    "load_engine_config",
]
