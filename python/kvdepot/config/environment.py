"""Environment variables that go before the configuration file."""

from collections.abc import Mapping

from kvdepot.config.keys import nearest
from kvdepot.errors import config_error

LOG_VARIABLES = ("KVDEPOT_LOG", "UC_LOGGER_LEVEL")
LOG_LEVELS = ("error", "warn", "info", "debug", "trace")
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
