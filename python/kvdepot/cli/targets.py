"""The depot that a verb changes: one that runs, or one inside this process over a stopped depot's directories."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvdepot import _native
from kvdepot.cli.places import one_namespace
from kvdepot.cli.running import RunningDepot, ask, posix_directories, user_of
from kvdepot.config import KVDepotConfig, load_config
from kvdepot.config.sizes import GIB
from kvdepot.errors import StorageError, UnavailableError, config_error
from kvdepot.stored.namespaces import StoredNamespace, find_namespaces

WAIT_MS = 10_000
CALL_MS = 10_000
POOL_BYTES_MIN = 64 << 20
POOL_BLOCKS_MIN = 8


@dataclass(frozen=True)
class Target:
    """Where a verb's depot is.

    Attributes:
        config: its configuration.
        directories: its Posix tier's directories, as far as they are known.
        running: the depot that runs; ``None`` = none does.
    """

    config: KVDepotConfig
    directories: tuple[Path, ...]
    running: RunningDepot | None

    @property
    def text(self) -> str:
        """The depot in words."""
        if self.running is not None:
            return f"the depot on {self.running.socket} (pid {self.running.pid or 'unknown'})"
        return f"a stopped depot's {', '.join(map(str, self.directories)) or 'tiers'}"

    @contextmanager
    def open(self, block_bytes: int) -> Iterator[_native.Depot]:
        """The depot: attached to, or started inside this process with a small pool of its own.

        Raises:
            UnavailableError: the running depot does not answer any more. StorageError: a directory cannot be used.
        """
        if self.running is not None:
            depot = _native.Depot.connect(self.running.socket, None, wait_ms=WAIT_MS, call_timeout_ms=CALL_MS)
        else:
            depot = _native.Depot.embedded(self._small(block_bytes).to_core_json(block_bytes))
        try:
            if not depot.attached:
                raise _unavailable(f"{self.text} does not answer: {depot.trouble}")
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
    """The options that name a depot: ``--socket``, ``--config`` or ``--directory``."""
    for option in (
        click.option(
            "--directory",
            "directories",
            multiple=True,
            type=click.Path(file_okay=False),
            help="A directory of a Posix tier; may be given several times, in the order of the configuration.",
        ),
        click.option("--socket", type=click.Path(), help="Unix socket of a running depot."),
        click.option(
            "--config", "file", type=click.Path(dir_okay=False), help="Configuration file; defaults without one."
        ),
    ):
        command = option(command)
    return command


def find(file: str | None, socket: str | None, directories: Iterable[str]) -> Target:
    """The depot that the options name: the one that runs, if one does.

    Raises:
        UnavailableError: nobody answers at ``socket``. ConfigError: the configuration is wrong.
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
    places = named or tuple(map(Path, posix_directories(config)))
    if socket is not None:
        running = ask(socket)
        if running is None:
            raise _unavailable(f"no depot answers on {socket}: `kvdepot depots` lists those that run")
        return Target(config, places, running)
    running = ask(config.socket) if config.socket is not None and not named else user_of(places)
    return Target(config, places, running or user_of(places))


def namespace_of(target: Target, prefix: str) -> StoredNamespace:
    """The only namespace in the target's directories whose name begins so.

    Raises:
        ConfigError: there is none, there are several, it cannot be read, or the target has no directories.
        StorageError: a directory cannot be read.
    """
    if not target.directories:
        raise config_error(f"{target.config.pipeline} has no Posix tier that lists namespaces: name --directory")
    try:
        found = one_namespace(find_namespaces(target.directories), prefix)
    except OSError as error:
        failure = StorageError(f"{error.filename}: cannot be read: {error.strerror}")
        failure.kind = "io"
        raise failure from error
    if found.problem:
        raise config_error(f"namespace {found.root} cannot be read: {found.problem}")
    return found


def layout_json(namespace: StoredNamespace) -> str:
    """A namespace's layout as the core spells it."""
    return json.dumps([[count, list(tensors)] for count, tensors in namespace.layout])


def _unavailable(text: str) -> UnavailableError:
    error = UnavailableError(text)
    error.kind = "unavailable"
    return error
