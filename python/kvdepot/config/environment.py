"""Environment variables that go before the configuration file."""

from collections.abc import Mapping

from kvdepot.config.keys import nearest
from kvdepot.errors import config_error

LOG_VARIABLES = ("KVDEPOT_LOG", "UC_LOGGER_LEVEL")
LOG_LEVELS = ("error", "warn", "info", "debug", "trace")
TRACE_FILES_VARIABLE = "UCM_LOG_MAX_FILES"
TRACE_SIZE_VARIABLE = "UCM_LOG_MAX_SIZE"
MIB = 1 << 20
_ALIASES = {"warning": "warn", "critical": "error", "fatal": "error"}


def log_level(configured: str, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """The log level that holds, and the variable that says so (``None`` = the configuration does).

    Raises:
        ConfigError: a variable names an unknown level.
    """
    for variable in LOG_VARIABLES:
        said = environ.get(variable, "").strip().lower()
        if not said:
            continue
        level = _ALIASES.get(said, said)
        if level not in LOG_LEVELS:
            hint = nearest(level, LOG_LEVELS)
            did_you_mean = f"did you mean {hint}?" if hint else f"levels are {', '.join(LOG_LEVELS)}"
            raise config_error(f"environment variable {variable} is {said!r}, no log level: {did_you_mean}")
        return level, variable
    return configured, None


def trace_limits(file_mb: int, files: int, environ: Mapping[str, str]) -> tuple[int, int]:
    """Bytes of a file of recorded requests, and how many files are kept.

    The size's variable counts bytes from a mebibyte on, and MiB below.

    Raises:
        ConfigError: a variable is no whole number above 0.
    """
    size = _number(TRACE_SIZE_VARIABLE, environ)
    kept = _number(TRACE_FILES_VARIABLE, environ)
    file_bytes = file_mb * MIB if size is None else size if size >= MIB else size * MIB
    return file_bytes, files if kept is None else kept


def _number(variable: str, environ: Mapping[str, str]) -> int | None:
    said = environ.get(variable, "").strip()
    if not said:
        return None
    if not said.isascii() or not said.isdigit() or not 0 < int(said) < 1 << 60:
        raise config_error(f"environment variable {variable} is {said!r}: write a whole number above 0, or unset it")
    return int(said)
