"""The directories and media that a verb works on, and the formats of sizes and times."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvdepot.checks.media import configured_media
from kvdepot.cli.processes import posix_directories
from kvdepot.config import load_config
from kvdepot.errors import ConfigError, KVDepotError, storage_error
from kvdepot.stored.media import Medium
from kvdepot.stored.namespaces import StoredNamespace, find_namespaces

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
DAY_S = 86_400


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that name directories and media: ``--config``, or ``--directory`` and ``--medium``."""
    for option in (
        click.option(
            "--medium",
            "media",
            multiple=True,
            type=click.Path(dir_okay=False),
            help="File or device of a Slab or Dax tier; may be repeated. Overrides --config.",
        ),
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


@dataclass(frozen=True)
class Places:
    """What a verb reads.

    Attributes:
        directories: directories of the Posix tier.
        media: files and devices of the Slab and Dax tiers.
    """

    directories: tuple[Path, ...]
    media: tuple[Path, ...]

    def namespaces(self) -> list[StoredNamespace]:
        """Returns all namespaces in the directories. Raises ``StorageError`` if one cannot be read."""
        return stored_in(self.directories)

    def open_media(self) -> tuple[list[Medium], dict[str, KVDepotError]]:
        """Opens all media. Returns those that can be read, and the errors of the others by their paths."""
        found = {str(path): _medium_or_error(path) for path in self.media}
        opened = [one for one in found.values() if isinstance(one, Medium)]
        return opened, {path: one for path, one in found.items() if isinstance(one, KVDepotError)}

    def open_media_or_tell(self) -> list[Medium]:
        """Opens all media, for a verb that lists. Those that cannot be read are told on stderr.

        Raises:
            KVDepotError: none can be read, and there are no directories.
        """
        opened, unread = self.open_media()
        for path, error in unread.items():
            if not opened and not self.directories:
                raise error
            click.echo(f"medium {path} is left out: {error}", err=True)
        return opened


def _medium_or_error(path: Path) -> Medium | KVDepotError:
    try:
        return Medium(path)
    except KVDepotError as error:
        return error


def chosen_places(file: str | None, directories: Iterable[str], media: Iterable[str]) -> Places:
    """Returns the named directories and media, or those of the configuration.

    Raises:
        ConfigError: the configuration is wrong or has no such tier.
    """
    named_media = tuple({path.resolve(): path for path in map(Path, media)}.values())
    named = tuple(directories)
    if named or named_media:
        return Places(tuple(chosen_directories(file, named)) if named else (), named_media)
    config = load_config(file, owns_pool=False)
    found = Places(
        tuple(map(Path, posix_directories(config))), tuple(Path(one.path) for one in configured_media(config))
    )
    if not found.directories and not found.media:
        raise ConfigError(
            f"pipeline: {config.pipeline} has no tier whose blocks can be listed (Posix, Slab, Dax): name --directory "
            "or --medium"
        )
    return found


def stored_in(directories: Iterable[Path]) -> list[StoredNamespace]:
    """Returns all namespaces in these directories.

    Raises:
        StorageError: a directory cannot be read.
    """
    try:
        return find_namespaces(directories)
    except OSError as error:
        raise storage_error(error) from error


def one_root(roots: Iterable[str], prefix: str) -> str:
    """Returns the only name that begins with ``prefix``. Raises ``ConfigError`` if there is none, or several."""
    found = sorted({root for root in roots if root.startswith(prefix.lower())})
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(f"no namespace begins with {prefix}: `kvdepot namespaces` lists them")
    raise ConfigError(f"{len(found)} namespaces begin with {prefix}: {', '.join(found[:4])} …")


def roots(found: Iterable[StoredNamespace], media: Iterable[Medium]) -> set[str]:
    """Returns the names of all namespaces in directories and on media."""
    return {one.root for one in found} | {one.root for medium in media for one in medium.namespaces}


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
