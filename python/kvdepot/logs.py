"""Logging of this process: the core logs to standard error; Python's logger ``kvdepot`` gets the same level."""

import logging

from kvdepot import _native
from kvdepot.config import KVDepotConfig

_PYTHON_LEVELS = {
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}
_done: list[str] = []


def set_up_logging(config: KVDepotConfig) -> str:
    """Sets up logging once per process. Later calls change nothing, because the core's logger cannot be replaced.

    Returns:
        The effective level: error, warn, info, debug or trace.

    Raises:
        ConfigError: an environment variable has an invalid value.
    """
    if not _done:
        settings = config.log_settings()
        _native.init_logging(settings.level, None, **settings.to_native())
        logging.getLogger("kvdepot").setLevel(_PYTHON_LEVELS[settings.level])
        _done.append(settings.level)
    return _done[0]
