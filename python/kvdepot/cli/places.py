"""The directories that a verb works on, and the formats of sizes and times."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from kvdepot.cli.processes import posix_directories
from kvdepot.config import load_config
from kvdepot.errors import ConfigError, storage_error
from kvdepot.stored.namespaces import StoredNamespace, choose, find_namespaces

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
DAY_S = 86_400


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that name directories: ``--config`` or ``--directory``."""
    for option in (
        click.option(
            "--directory",
            "directories",
            multiple=True,
            type=click.Path(file_okay=False),
            help="Directory of the Posix tier; may be repeated. Overrides --config.",
        ),
        click.option(
            "--config", "file", type=click.Path(dir_okay=False), help="Configuration file; default: the defaults."
        ),
    ):
        command = option(command)
    return command


def chosen_directories(file: str | None, directories: Iterable[str]) -> list[Path]:
    """Returns the named directories, or those of the configuration.

    Raises:
        ConfigError: the configuration is wrong or has no Posix tier.
    """
    # A directory that is named twice is one.
    named: dict[Path, Path] = {}
    for directory in map(Path, directories):
        named.setdefault(directory.resolve(), directory)
    if named:
        return list(named.values())
    config = load_config(file, owns_pool=False)
    if "Posix" not in config.tiers:
        raise ConfigError(f"pipeline: {config.pipeline} has no Posix tier, so it has no directories: name --directory")
    return [Path(one) for one in posix_directories(config)]


def stored_namespaces(file: str | None, directories: Iterable[str]) -> list[StoredNamespace]:
    """Returns all namespaces in a verb's directories.

    Raises:
        StorageError: a directory cannot be read.
    """
    return stored_in(chosen_directories(file, directories))


def stored_in(directories: Iterable[Path]) -> list[StoredNamespace]:
    """Returns all namespaces in these directories.

    Raises:
        StorageError: a directory cannot be read.
    """
    try:
        return find_namespaces(directories)
    except OSError as error:
        raise storage_error(error) from error


def one_namespace(namespaces: Iterable[StoredNamespace], prefix: str) -> StoredNamespace:
    """Returns the only namespace whose name begins with ``prefix``.

    Raises:
        ConfigError: there is none, or there are several.
    """
    found = choose(namespaces, prefix)
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(f"no namespace begins with {prefix}: `kvdepot namespaces` lists them")
    raise ConfigError(f"{len(found)} namespaces begin with {prefix}: {', '.join(one.root for one in found[:4])} …")


def size_text(count: int) -> str:
    """Formats a number of bytes for people."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} bytes" if unit == 0 else f"{value:.1f} {UNITS[unit]}"


def age_text(moment_unix_s: float | None, now_unix_s: float | None = None) -> str:
    """Formats the time since a moment for people."""
    if moment_unix_s is None:
        return "-"
    age_s = max(0.0, (time.time() if now_unix_s is None else now_unix_s) - moment_unix_s)
    for unit, seconds in (("d", DAY_S), ("h", 3600), ("min", 60)):
        if age_s >= 2 * seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"
