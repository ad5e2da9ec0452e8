"""``kvdepot stop``: shuts depots down."""

import os
import select
import signal
import sys
import time

import click

from kvdepot.cli.output import print_json
from kvdepot.cli.progress import counting
from kvdepot.cli.running import BLOCK_BYTES, RunningDepot, ask, running_depots
from kvdepot.cli.status_door import WAIT_S, read_status
from kvdepot.config import load_config
from kvdepot.errors import DepotTimeoutError, KVDepotError, UnavailableError

STEP_S = 0.5


@click.command()
@click.option("--config", "file", type=click.Path(dir_okay=False), help="Configuration file; default: the defaults.")
@click.option("--socket", type=click.Path(), help="Unix socket; default: derived from the configuration.")
@BLOCK_BYTES
@click.option("--all", "all_depots", is_flag=True, help="Stop all depots that `kvdepot depots` lists.")
@click.option(
    "--timeout", type=click.FloatRange(min=0), default=60.0, show_default=True, help="Seconds to wait for the exit."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    file: str | None, socket: str | None, block_bytes: int | None, all_depots: bool, timeout: float, as_json: bool
) -> None:
    """Shuts a running depot down: it writes blocks that are in no tier yet, then its process exits.

    Attached engines continue without it, and start another one at their next attempt to attach. The exit status is 1 if
    a depot has not exited within --timeout; it continues to shut down. A service manager may start its depot again.

    With --all, a depot that cannot be stopped from here (it runs in another pid namespace) is reported, and the others
    are stopped all the same; the exit status is 1.

    \b
    kvdepot stop --config /etc/kvdepot.yaml
    kvdepot stop --all
    """
    if all_depots:
        found = list(running_depots())
        if not found and not as_json:
            click.echo("no depot of this user runs: nothing was stopped")
    else:
        if socket is None:
            socket = load_config(file, owns_pool=False).socket_path(block_bytes)
        depot = ask(socket)
        if depot is None:
            raise UnavailableError(f"no depot answers on {socket}: `kvdepot depots` lists the running ones")
        found = [depot]
    end_s = time.monotonic() + timeout
    errors = [_end_or_error(depot, end_s, timeout, as_json) for depot in found]
    if as_json:
        print_json(
            [
                {"socket": one.socket, "pid": one.pid or None, "ended": error is None, "error": error and str(error)}
                for one, error in zip(found, errors, strict=True)
            ]
        )
    failed = [error for error in errors if error is not None]
    if failed:
        raise type(failed[0])("\n".join(map(str, failed)))


def _end_or_error(depot: RunningDepot, end_s: float, timeout: float, quiet: bool) -> KVDepotError | None:
    """Ends a depot. Returns why it has not ended."""
    try:
        if _end(depot, end_s, quiet):
            return None
    except KVDepotError as error:
        return error
    return DepotTimeoutError(f"depot {depot.pid} has not exited within {timeout:g} s: it may still be writing blocks")


def _end(depot: RunningDepot, end_s: float, quiet: bool) -> bool:
    """Ends a depot. Returns whether it has ended by ``end_s``."""
    if not depot.pid:
        raise UnavailableError(f"the depot on {depot.socket} runs in another pid namespace: stop it there")
    try:
        process = os.pidfd_open(depot.pid)
    except ProcessLookupError:
        return True
    try:
        # Another process may have that id by now: the socket shows whose it is.
        if (now := ask(depot.socket)) is None or now.pid != depot.pid:
            return True
        try:
            signal.pidfd_send_signal(process, signal.SIGTERM)
        except PermissionError as error:
            raise UnavailableError(
                f"the depot on {depot.socket} (pid {depot.pid}) is of another user: stop it as that user"
            ) from error
        dirty = depot.stats["dirty_blocks"]
        if not quiet:
            click.echo(
                f"stopping depot {depot.pid} on {depot.socket}" + (f": {dirty} blocks to write" if dirty else "")
            )
        label = "blocks written" if dirty else "waiting for its exit"
        with counting(label, dirty, hidden=quiet) as written:
            left = dirty
            while not select.select([process], [], [], min(STEP_S, max(0.0, end_s - time.monotonic())))[0]:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return False
                # Its HTTP socket answers until it exits, unless it hangs.
                shows = not quiet and sys.stderr.isatty()
                status = read_status(depot.socket, min(WAIT_S, left_s)) if shows else None
                if status is not None:
                    now_left = min(left, int(status["dirty_blocks"]))
                    written(left - now_left)
                    left = now_left
        if not quiet:
            click.echo(f"depot {depot.pid} has exited")
        return True
    finally:
        os.close(process)
