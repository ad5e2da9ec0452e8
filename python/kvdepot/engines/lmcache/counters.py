"""Counts of successes and failures in LMCache, logged with its own logger."""

import functools
import importlib
import logging

from kvdepot.engines import counters

__all__ = ["Counters", "lmcache_logger"]


@functools.cache
def lmcache_logger() -> logging.Logger:
    """Returns the logger of both interfaces: with LMCache's format and level if LMCache is installed."""
    try:
        made: logging.Logger = importlib.import_module("lmcache.logging").init_logger("lmcache.kvdepot")
    except ImportError:
        made = logging.getLogger("lmcache.kvdepot")
    return made


class Counters(counters.Counters):
    """Counts of one adapter or backend in LMCache."""

    def __init__(self) -> None:
        super().__init__(lmcache_logger)
