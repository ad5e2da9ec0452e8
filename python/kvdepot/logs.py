"""The log of this process: the core's lines go to standard error; Python's logger ``kvdepot`` has the same level."""

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
    """Sets it up once a process; later calls change nothing, because the core's logger cannot be replaced.

    Returns:
        The level that holds: error, warn, info, debug or trace.

    Raises:
        ConfigError: a variable of the environment has no meaning.
    """
    if not _done:
        settings = config.log_settings()
        _native.init_logging(settings.level, None, **settings.to_native())
        logging.getLogger("kvdepot").setLevel(_PYTHON_LEVELS[settings.level])
        _done.append(settings.level)
    return _done[0]
