"""``kvdepot serve``: the node's depot as a process of its own."""

import signal
import sys
from typing import Any

import click

from kvdepot import _native
from kvdepot.cli import wire
from kvdepot.config import load_config
from kvdepot.config.environment import LOG_LEVELS
from kvdepot.config.machine import Machine
from kvdepot.errors import config_error


@click.command()
@click.option("--config", "file", type=click.Path(dir_okay=False), help="Configuration file; defaults without one.")
@click.option("--core-json", help="The core's own JSON instead of a file, as engines pass it; needs --socket.")
@click.option("--socket", type=click.Path(), help="Unix socket; made from the configuration when left out.")
@click.option("--block-bytes", type=click.IntRange(min=1), help="Bytes of a block, for a Staging pool sized in blocks.")
@click.option(
    "--idle-exit-s",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="End when nobody was attached for so many seconds; 0 = never.",
)
@click.option(
    "--log-level", type=click.Choice([*LOG_LEVELS, "warning"]), help="Goes before environment and configuration."
)
@click.option("--log-file", type=click.Path(dir_okay=False), help="Write log lines there, not to standard error.")
@wire.options
def command(
    file: str | None,
    core_json: str | None,
    socket: str | None,
    block_bytes: int | None,
    idle_exit_s: int,
    log_level: str | None,
    log_file: str | None,
    **said: Any,
) -> None:
    """Runs a depot until SIGTERM or SIGINT.

    Engines with the same configuration find it by themselves. Returns at once when another depot already serves the
    socket. With --service-port or any other option of the wire door, clients on other machines find it, too, and so do
    InfiniStore's.
    """
    if core_json is not None and (file is not None or socket is None):
        raise config_error("--core-json: goes with --socket and without --config")
    config = load_config(file)
    if core_json is None:
        core_json = config.to_core_json(block_bytes)
    if socket is None:
        socket = config.socket_path(block_bytes)
    wire_json = wire.wire_json(said) if wire.wanted(said) else None
    if wire_json is not None:
        core_json = wire.with_pool(core_json, said, Machine.here())
    # SIGTERM ends the depot in order: what is dirty is written first, within bounds.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _native.init_logging(log_level or config.effective_log_level(), log_file)
    if wire_json is None:
        _native.serve(core_json, socket, idle_exit_s * 1000)
    else:
        _native.serve(core_json, socket, idle_exit_s * 1000, wire_json)
