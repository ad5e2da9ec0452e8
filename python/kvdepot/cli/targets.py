"""The depot that a verb changes: a running one, or one inside this process over a stopped depot's directories."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvdepot import _native
from kvdepot.checks.media import configured_media
from kvdepot.cli.processes import posix_directories, process
from kvdepot.cli.running import UNKNOWN_SOCKET, RunningDepot, ask, user_of
from kvdepot.config import KVDepotConfig, load_config
from kvdepot.config.pipeline import split_pipeline
from kvdepot.config.sizes import GIB
from kvdepot.errors import ConfigError, UnavailableError

WAIT_MS = 10_000
CALL_MS = 10_000
POOL_BYTES_MIN = 64 << 20
POOL_BLOCKS_MIN = 8


@dataclass(frozen=True)
class Target:
    """A verb's depot.

    Attributes:
        config: its configuration.
        directories: directories of its Posix tier, as far as they are known.
        running: the running depot; ``None`` = none runs.
        sure: whether a running depot is known to use these directories.
        media: media of its Slab and Dax tiers, as far as they are known.
    """

    config: KVDepotConfig
    directories: tuple[Path, ...]
    running: RunningDepot | None
    sure: bool = True
    media: tuple[Path, ...] = ()

    @property
    def text(self) -> str:
        """Description of the depot for messages."""
        if self.running is not None:
            return f"the depot on {self.running.socket} (pid {self.running.pid or 'unknown'})"
        return f"a stopped depot's {', '.join(map(str, self.directories)) or 'tiers'}"

    @property
    def lower_tiers(self) -> tuple[str, ...]:
        """The tiers that may hold blocks beside the Posix tier: those of the running depot, or of the configuration."""
        # A depot that does not answer tells no pipeline.
        pipeline = None if self.running is None else self.running.stats.get("pipeline")
        tiers = self.config.tiers if pipeline is None else split_pipeline(pipeline)[1]
        return tuple(tier for tier in tiers if tier not in ("Posix", "Empty"))

    def check_running(self) -> None:
        """Raises ``UnavailableError`` if no depot runs."""
        if self.running is None:
            uses = ", ".join(map(str, self.directories)) or self.config.pipeline
            raise UnavailableError(
                f"no depot runs with {uses}: start one with kvdepot serve, or name its --config or --socket"
            )

    @contextmanager
    def open(self, block_bytes: int) -> Iterator[_native.Depot]:
        """Yields the depot: attached, or started inside this process with a small pool of its own.

        Raises:
            UnavailableError: the running depot no longer answers. StorageError: a directory cannot be used.
        """
        if self.running is not None and self.running.socket == UNKNOWN_SOCKET:
            raise UnavailableError(f"{self.text} cannot be asked: name its --socket, or stop it")
        if self.running is not None:
            depot = _native.Depot.connect(self.running.socket, None, wait_ms=WAIT_MS, call_timeout_ms=CALL_MS)
        else:
            depot = _native.Depot.embedded(self._small(block_bytes).to_core_json(block_bytes))
        try:
            if not depot.attached:
                raise UnavailableError(f"{self.text} does not answer: {depot.trouble}")
            yield depot
        finally:
            depot.close()

    def _small(self, block_bytes: int) -> KVDepotConfig:
        pool_bytes = max(POOL_BYTES_MIN, POOL_BLOCKS_MIN * (block_bytes + 4096))
        written = {"posix_write": "through"} if "Posix" in self.config.tiers else {}
        return self.config.with_values(
            mode="embedded",
            pool_gb=pool_bytes / GIB,
            pool_slots=None,
            pool_keep_s=None,
            pool_mlock=None,
            pool_numa=None,
            metrics_port=None,
            **written,
        )


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that name a depot: ``--socket``, ``--config`` or ``--directory``."""
    for option in (
        click.option(
            "--directory",
            "directories",
            multiple=True,
            type=click.Path(file_okay=False),
            help="Directory of a Posix tier; repeat it in the order of the configuration.",
        ),
        click.option("--socket", type=click.Path(), help="Unix socket of a running depot."),
        click.option(
            "--config", "file", type=click.Path(dir_okay=False), help="Configuration file; default: the defaults."
        ),
    ):
        command = option(command)
    return command


def find(file: str | None, socket: str | None, directories: Iterable[str]) -> Target:
    """Returns the depot that the options name: the running one, if there is one.

    Raises:
        UnavailableError: no depot answers at ``socket``. ConfigError: the configuration is wrong, or the options name
            directories that the depot does not use.
    """
    named = tuple(Path(directory) for directory in directories)
    if named and file is None:
        config = load_config(
            {
                "pipeline": "Cache|Posix",
                "directories": [str(one.absolute()) for one in named],
                "posix_capacity_gb": 0.0,
            },
            owns_pool=False,
        )
    else:
        config = load_config(file, owns_pool=False)
    configured = tuple(map(Path, posix_directories(config)))
    if named and file is not None and _real(named) != _real(configured):
        raise ConfigError(f"--directory: {file} has other directories, {_text(configured)}: use one of the two options")
    if socket is None:
        running = ask(config.socket) if config.socket is not None and not named else None
        running = running or user_of(configured, config)
        if running is None and not configured and config.socket is None:
            running = _at_default_socket(config)
        return Target(config, configured, running, _checked(running, configured), _media(config))
    running = ask(socket)
    if running is None:
        raise UnavailableError(f"no depot answers on {socket}: `kvdepot depots` lists the running ones")
    if named or file is not None:
        return Target(config, configured, running, _checked(running, configured), _media(config))
    used = process(running.pid).directories
    return Target(config, tuple(map(Path, used or ())), running, used is not None)


def _at_default_socket(config: KVDepotConfig) -> RunningDepot | None:
    try:
        return ask(config.socket_path())
    except ConfigError:
        return None  # each engine has its own socket, or its name depends on the size of a block


def _media(config: KVDepotConfig) -> tuple[Path, ...]:
    return tuple(Path(one.path) for one in configured_media(config))


def _checked(running: RunningDepot | None, directories: tuple[Path, ...]) -> bool:
    """Returns whether the depot is known to use these directories.

    Raises:
        ConfigError: it uses others.
    """
    used = None if running is None else process(running.pid).directories
    if used is not None and running is not None and _real(map(Path, used)) != _real(directories):
        raise ConfigError(
            f"the depot on {running.socket} (pid {running.pid}) uses {_text(used) or 'no directories'}, not "
            f"{_text(directories) or 'none'}: name all of its directories, or its configuration"
        )
    return running is None or used is not None


def _real(directories: Iterable[Path]) -> set[str]:
    return {os.path.realpath(directory) for directory in directories}


def _text(directories: Iterable[str | Path]) -> str:
    return ", ".join(map(str, directories))
