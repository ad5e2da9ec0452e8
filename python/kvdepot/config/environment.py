"""Environment variables that override the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdepot.config.keys import suggestion
from kvdepot.errors import ConfigError

if TYPE_CHECKING:
    from kvdepot.config.model import KVDepotConfig

LOG_VARIABLES = ("KVDEPOT_LOG", "UC_LOGGER_LEVEL")
LOG_LEVELS = ("error", "warn", "info", "debug", "trace")
SIZE_VARIABLE = "UCM_LOG_MAX_SIZE"
FILES_VARIABLE = "UCM_LOG_MAX_FILES"
SIZE_MAX = 1 << 40
FILES_MAX = 1000
_ALIASES = {"warning": "warn", "critical": "error", "fatal": "error"}
LOG_BOUNDS = ("log_max_size_mb", "log_max_files")
"""Keys that an environment variable overrides."""
MIB = 1 << 20


@dataclass(frozen=True)
class LogSettings:
    """How the core writes its log, for ``_native.init_logging`` and the options of ``kvdepot serve``."""

    level: str
    json: bool
    max_size_mb: int
    max_files: int
    burst_lines: int

    def to_native(self) -> dict[str, Any]:
        """Returns the named arguments of ``_native.init_logging``."""
        return {
            "json": self.json,
            "max_bytes": self.max_size_mb * MIB,
            "max_files": self.max_files,
            "burst_lines": self.burst_lines,
        }

    def to_options(self) -> list[str]:
        """Returns the options of ``kvdepot serve``."""
        return [
            *("--log-level", self.level),
            *("--log-format", "json" if self.json else "text"),
            *("--log-max-size", str(self.max_size_mb)),
            *("--log-max-files", str(self.max_files)),
            *("--log-burst-lines", str(self.burst_lines)),
        ]


def log_settings(config: "KVDepotConfig", environ: Mapping[str, str]) -> LogSettings:
    """Returns the effective settings of a configuration and the environment.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    return LogSettings(
        level=log_level(config.log_level, environ)[0],
        json=config.log_format == "json",
        max_size_mb=log_bound("log_max_size_mb", config.log_max_size_mb, environ)[0],
        max_files=log_bound("log_max_files", config.log_max_files, environ)[0],
        burst_lines=config.log_burst_lines,
    )


def log_level(configured: str, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Returns the effective log level, and the variable that sets it (``None`` = the configuration does).

    Raises:
        ConfigError: a variable names an unknown level.
    """
    for variable in LOG_VARIABLES:
        said = environ.get(variable, "").strip().lower()
        if not said:
            continue
        level = _ALIASES.get(said, said)
        if level not in LOG_LEVELS:
            do = suggestion(level, LOG_LEVELS, f"levels are {', '.join(LOG_LEVELS)}")
            raise ConfigError(f"environment variable {variable} is {said!r}, which is not a log level: {do}")
        return level, variable
    return configured, None


def trace_limits(file_mb: int, files: int, environ: Mapping[str, str]) -> tuple[int, int]:
    """Returns the size limit in bytes of a file of recorded requests, and the number of files to keep.

    Raises:
        ConfigError: a variable has an invalid value.
    """
    size_bytes, kept = _file_limits(environ)
    if size_bytes == 0:
        size_bytes = _NO_BOUND_BYTES
    return file_mb * MIB if size_bytes is None else size_bytes, files if kept is None else kept


def log_bound(key: str, configured: int, environ: Mapping[str, str]) -> tuple[int, str | None]:
    """Returns the effective value of a key of ``LOG_BOUNDS``, and the variable that sets it (``None`` = none does).

    Raises:
        ConfigError: a variable has an invalid value.
    """
    size_bytes, kept = _file_limits(environ)
    if key == "log_max_size_mb":
        return (configured, None) if size_bytes is None else (size_bytes // MIB, SIZE_VARIABLE)
    return (configured, None) if kept is None else (kept, FILES_VARIABLE)


_NO_BOUND_BYTES = 1 << 62


def _file_limits(environ: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Returns bytes per file (0 = no bound) and files to keep, as set in the environment; ``None`` = not set.

    A size from 2^20 on counts bytes, a smaller one MiB. At least one file is kept: the current one.
    """
    size = _number(SIZE_VARIABLE, SIZE_MAX, environ)
    kept = _number(FILES_VARIABLE, FILES_MAX, environ)
    if size is not None and size < MIB:
        size *= MIB
    return size, None if kept is None else max(1, kept)


def _number(variable: str, most: int, environ: Mapping[str, str]) -> int | None:
    said = environ.get(variable, "").strip()
    if not said:
        return None
    # int() rejects numbers of thousands of digits with another error.
    if not (said.isascii() and said.isdigit() and len(said) < 20 and int(said) <= most):
        raise ConfigError(
            f"environment variable {variable} is {said!r}: write a whole number from 0 to {most}, or unset it"
        )
    return int(said)
