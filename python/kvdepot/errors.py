"""Exceptions of kvdepot: the same classes whether Python or the Rust core raises them.

Every class derives from ``KVDepotError`` and, where one fits, from the built-in that callers already catch
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
    "is_failure",
    "storage_error",
]


def storage_error(error: OSError, deed: str = "read", path: object = None) -> StorageError:
    """Returns the failure to do ``deed``, a past participle, to ``path``, by default the one that the error names."""
    return StorageError(f"{error.filename if path is None else path}: cannot be {deed}: {error.strerror}")


def is_failure(error: BaseException) -> bool:
    """Returns whether ``error`` is a failure (an ordinary exception or a panic of the core), not a request to exit."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"
