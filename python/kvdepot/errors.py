"""Errors of kvdepot: the same classes whether Python or the Rust core raises them.

Every class derives from ``KVDepotError`` and, where one fits, from the built-in that callers catch already
(``ValueError``, ``OSError``, ``TimeoutError`` …). ``kind`` is the stable lower-case name of the failure.
"""

from kvdepot._native import (
    BlockNotFoundError,
    BusyError,
    ConfigError,
    CorruptError,
    DepotTimeoutError,
    KVDepotError,
    NoSpaceError,
    ProtocolError,
    StorageError,
    UnavailableError,
    UnsupportedError,
)

__all__ = [
    "BlockNotFoundError",
    "BusyError",
    "ConfigError",
    "CorruptError",
    "DepotTimeoutError",
    "KVDepotError",
    "NoSpaceError",
    "ProtocolError",
    "StorageError",
    "UnavailableError",
    "UnsupportedError",
    "config_error",
]


def config_error(message: str) -> ConfigError:
    """A ``ConfigError`` raised on the Python side, with the ``kind`` that the core's own carry."""
    error = ConfigError(message)
    error.kind = "config"
    return error


def is_failure(error: BaseException) -> bool:
    """Whether something failed: an ordinary error or a panic of the core, and no request to end the process."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"
