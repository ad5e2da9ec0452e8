"""``kvdepot serve``: runs the node's depot as a separate process."""

import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from kvdepot import _native
from kvdepot.cli import wire
from kvdepot.cli.running import peer_pid
from kvdepot.config import KVDepotConfig, load_config
from kvdepot.config.environment import LOG_LEVELS
from kvdepot.config.machine import Machine
from kvdepot.config.rules import is_address
from kvdepot.config.token_files import token_warnings
from kvdepot.errors import ConfigError, UnavailableError


def _address(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not is_address(value):
        raise click.BadParameter("must be an IP address, such as 127.0.0.1 or 0.0.0.0")
    return value


@click.command()
@click.option("--config", "file", type=click.Path(dir_okay=False), help="Configuration file; default: the defaults.")
@click.option(
    "--core-json",
    hidden=True,  # for engines, which start their depot with it
    help="The core's JSON instead of a file and variables, as engines pass it; needs --socket.",
)
@click.option("--socket", type=click.Path(), help="Unix socket; default: derived from the configuration.")
@click.option("--block-bytes", type=click.IntRange(min=1), help="Bytes of a block, for a Staging pool sized in blocks.")
@click.option(
    "--idle-exit-s",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Exit after this many seconds without an attached client; 0 = never.",
)
@click.option(
    "--take-over",
    is_flag=True,
    help="Take over the pool and its blocks from the depot that serves the socket; that depot then exits.",
)
@click.option(
    "--wait-for-lock",
    is_flag=True,
    help="If another depot serves the socket, wait until it exits, and then serve.",
)
@click.option(
    "--detach",
    is_flag=True,
    help="Return immediately and serve in the background, in a separate session, as engines start their depot.",
)
@click.option(
    "--drain-timeout",
    type=click.IntRange(0, 86_400),
    metavar="SECONDS",
    help="Time limit for writing blocks that are in no tier yet at shutdown; default: drain_timeout_s.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65_535),
    help="Port of metrics_host for the status page and /metrics; default: metrics_port.",
)
@click.option("--metrics-host", callback=_address, help="IP address of that port; default: metrics_host.")
@click.option(
    "--metrics-token-file",
    type=click.Path(dir_okay=False, exists=True, resolve_path=True),
    help="File with the secret for that port; default: metrics_token_file.",
)
@click.option(
    "--log-level", type=click.Choice([*LOG_LEVELS, "warning"]), help="Overrides environment and configuration."
)
@click.option("--log-format", type=click.Choice(["text", "json"]), help="Overrides log_format.")
@click.option("--log-max-size", type=click.IntRange(0), metavar="MIB", help="Overrides log_max_size_mb; 0 = no limit.")
@click.option("--log-max-files", type=click.IntRange(1), metavar="FILES", help="Overrides log_max_files.")
@click.option("--log-burst-lines", type=click.IntRange(0), metavar="LINES", help="Overrides log_burst_lines.")
@click.option("--log-file", type=click.Path(dir_okay=False), help="Log to this file instead of standard error.")
@wire.options
def command(
    file: str | None,
    core_json: str | None,
    socket: str | None,
    block_bytes: int | None,
    idle_exit_s: int,
    take_over: bool,
    wait_for_lock: bool,
    detach: bool,
    drain_timeout: int | None,
    metrics_port: int | None,
    metrics_host: str | None,
    metrics_token_file: str | None,
    log_level: str | None,
    log_format: str | None,
    log_max_size: int | None,
    log_max_files: int | None,
    log_burst_lines: int | None,
    log_file: str | None,
    **said: Any,
) -> None:
    """Runs a depot until SIGTERM, SIGINT or SIGHUP.

    On these signals it writes blocks that are in no tier yet, for at most --drain-timeout, and exits with status 0.
    Engines with the same configuration find the depot automatically. It exits with status 0 if another depot already
    serves the socket, and with status 1 if another process holds its lock but no depot answers.

    With --service-port or any other option of the network listener, clients on other machines can use the depot, too,
    including those of InfiniStore. Such a depot keeps everything in memory unless --config gives it a tier. With these
    options, and with --metrics-port, it exits with status 1 if another depot already serves the socket, because that
    one does not have its ports.

    With --detach it is no descendant of the process that started it, so a server that kills all of its children, such
    as vLLM's, does not kill the depot. Use --log-file then. The exit status does not show whether the depot could
    start.

    With --wait-for-lock it does not exit if another depot serves the socket: it waits until that one exits, however
    long it takes, and then serves. Until then it has no pool. Use it with service managers that restart every process
    that exits, such as a DaemonSet.

    With --take-over it takes the pool over from the depot that serves the socket. That depot hands over all of its
    blocks and exits with status 0. If the pools differ in size or the versions are not compatible, that depot continues
    to serve, and this one exits with an error. If no depot serves the socket, this one starts with an empty pool.

    \b
    kvdepot serve --config /etc/kvdepot.yaml
    kvdepot serve --config /etc/kvdepot.yaml --metrics-port 9400 --take-over
    kvdepot serve --host 10.0.0.1 --service-port 22345 --prealloc-size 64 --token-file /etc/kvdepot/token
    """
    if take_over and wait_for_lock:
        raise ConfigError(
            "--wait-for-lock: --take-over ends the running depot instead of waiting for it: use one of them"
        )
    if core_json is not None and (file is not None or socket is None):
        raise ConfigError("--core-json: goes with --socket and without --config")
    wire_json = wire.wire_json(said) if wire.wanted(said) else None
    if core_json is not None:
        # The parent process has decided everything: inherited environment variables must not change it.
        config = KVDepotConfig()
    else:
        config = load_config({"pipeline": "Cache"} if wire_json and wire.memory_only(file, os.environ) else file)
        core_json = config.to_core_json(block_bytes)
    if socket is None:
        socket = config.socket_path(block_bytes)
    if wire_json is not None:
        core_json = wire.with_pool(core_json, said, Machine.here())
    if (wire_json is not None or metrics_port) and not (take_over or wait_for_lock):
        _check_unserved(socket)
    overriding = {
        "drain_timeout_ms": None if drain_timeout is None else drain_timeout * 1000,
        "metrics_port": metrics_port,
        "metrics_host": metrics_host,
        "metrics_token_file": metrics_token_file,
    }
    core_json = _with_values(core_json, overriding)
    _warn_of_tokens(core_json, wire_json)
    overruled: dict[str, Any] = {
        "level": log_level,
        "json": None if log_format is None else log_format == "json",
        "max_size_mb": log_max_size,
        "max_files": log_max_files,
        "burst_lines": log_burst_lines,
    }
    logs = replace(config.log_settings(), **{name: value for name, value in overruled.items() if value is not None})
    if detach:
        _detach()
    _end_in_order_on_signals()
    _native.init_logging(logs.level, log_file, **logs.to_native())
    _native.serve(
        core_json,
        socket,
        idle_exit_ms=idle_exit_s * 1000,
        wire_json=wire_json,
        take_over=take_over,
        wait_for_lock=wait_for_lock,
    )


def _check_unserved(socket: str) -> None:
    """Refuses to serve a socket that another depot serves: it does not open the ports requested now."""
    pid = peer_pid(socket)
    if pid is not None:
        raise UnavailableError(
            f"a depot (pid {pid or 'unknown'}) already serves {socket}, without the requested ports: "
            "stop it, add --take-over, or name another --socket"
        )


def _warn_of_tokens(core_json: str, wire_json: str | None) -> None:
    core, listener = json.loads(core_json), json.loads(wire_json or "{}")
    others = {"remote_token_file": core.get("remote", {}).get("token_file"), "--token-file": listener.get("token_file")}
    for warning in token_warnings(core.get("metrics_token_file"), others):
        click.echo(f"warning: {warning}", err=True)


def _with_values(core_json: str, values: Mapping[str, int | str | None]) -> str:
    said = {name: value for name, value in values.items() if value is not None}
    return json.dumps(json.loads(core_json) | said) if said else core_json


def _detach() -> None:
    """Continues in a child whose parent exits immediately, so that it is no descendant of the starting process.

    No thread has been started yet, so forking is safe.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() != 0:
        os._exit(0)
    os.setsid()


def _end_in_order_on_signals() -> None:
    """Makes SIGTERM, SIGINT and SIGHUP end the depot in order, with status 0."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # nohup ignores SIGHUP, a shell ignores SIGINT for background jobs.
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: sys.exit(0))
