"""Options that an engine hands over: a file's name or keys of the configuration, among keys of the engine's own."""

import os
from collections.abc import Mapping

from kvdepot.config.loader import load_config
from kvdepot.config.model import KVDepotConfig
from kvdepot.errors import ConfigError

FILE_KEY = "config"


def load_engine_config(options: Mapping[str, object]) -> KVDepotConfig:
    """Reads the configuration of a process that attaches to a depot.

    Args:
        options: the name of a file (``config``), or keys of the configuration; empty = defaults.

    Raises:
        ConfigError: a key or value is wrong, or there are keys in addition to a file's name.
    """
    keys = dict(options)
    file = keys.pop(FILE_KEY, None)
    if file is None:
        return load_config(keys or None, owns_pool=False)
    if keys:
        raise ConfigError(f"{FILE_KEY}: names a file, but there are other keys, too: {', '.join(sorted(keys))}")
    if not isinstance(file, str | os.PathLike | Mapping):
        raise ConfigError(f"{FILE_KEY}: must be the name of a file, got {file!r}")
    return load_config(file, owns_pool=False)


def name_of(value: object, key: str) -> str:
    """Returns a name that the user chose, for example of a version of the weights. A number counts as a name.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise ConfigError(f"{key}: must be a name or a number, got {value!r}")
    return str(value)
