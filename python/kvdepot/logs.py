"""Log levels: one setting for the core's lines and for Python's logger ``kvdepot``."""

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
    """Sets the level once a process; later calls change nothing, because the core's logger cannot be replaced.

    Returns:
        The level that holds: error, warn, info, debug or trace.

    Raises:
        ConfigError: the environment names an unknown level.
    """
    if not _done:
        level = config.effective_log_level()
        _native.init_logging(level, None)
        logging.getLogger("kvdepot").setLevel(_PYTHON_LEVELS[level])
        _done.append(level)
    return _done[0]
