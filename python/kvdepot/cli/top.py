"""``kvdepot top``: shows the activity of running depots, refreshed."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from kvdepot.cli.output import print_json, print_table
from kvdepot.cli.places import size_text
from kvdepot.cli.running import BLOCK_BYTES, running_depots
from kvdepot.cli.status_door import read_page, read_status
from kvdepot.config import load_config
from kvdepot.errors import UnavailableError

COLUMNS = (
    "pid",
    "pipeline",
    "pool used",
    "blocks",
    "dirty",
    "hit",
    "hit 1h",
    "dump/s",
    "load/s",
    "miss/s",
    "read/s",
    "write/s",
    "evict/s",
)
CLEAR = "\x1b[H\x1b[2J"


@click.command()
@click.option("--config", "file", type=click.Path(dir_okay=False), help="Configuration file of the depot.")
@click.option("--socket", "sockets", multiple=True, type=click.Path(), help="Unix socket; default: all running depots.")
@BLOCK_BYTES
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between two samples."
)
@click.option("--once", is_flag=True, help="Take two samples, print once and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one sample as JSON and exit.")
def command(
    file: str | None, sockets: tuple[str, ...], block_bytes: int | None, interval: float, once: bool, as_json: bool
) -> None:
    """Shows pool, blocks and rates of the depots of this user, refreshed until Ctrl-C, also while none of them answers.

    These are the depots that `kvdepot depots` lists, or those of --socket or --config.

    Reads the HTTP socket next to each depot's own (`SOCKET.http`). Rates are blocks and bytes per second since the
    previous sample; read and write are those of the tiers. load/s counts the blocks that loads found, miss/s those
    that they asked for in vain. hit is the share of looked-up blocks that the depot had, since the previous sample
    and in the last hour.

    \b
    kvdepot top
    kvdepot top --once --interval 1
    kvdepot top --config /etc/kvdepot.yaml
    """
    if file is not None and not sockets:
        sockets = (load_config(file, owns_pool=False).socket_path(block_bytes),)
    if as_json:
        print_json([{"socket": socket, **stats} for socket, stats in look(sockets).items()])
        return
    try:
        refresh(sockets, interval, once)
    except KeyboardInterrupt:
        if once:
            raise
        # The terminal shows ^C on this line.
        click.echo(err=True)


def refresh(sockets: Sequence[str], interval: float, once: bool) -> None:
    """Prints what the depots did in each interval, or in the first one only.

    Raises:
        UnavailableError: none answers at the start, or after the only interval. Later a depot may be restarting.
    """
    before, since = look(sockets), time.monotonic()
    while True:
        time.sleep(interval)
        after, now = look(sockets) if once else answering(sockets), time.monotonic()
        if not once and sys.stdout.isatty():
            click.echo(CLEAR, nl=False)
        if after:
            hours = {socket: hour_rate(read_page(socket, "/history")) for socket in after}
            print_table(COLUMNS, rows(before, after, now - since, hours))
        else:
            click.echo("no depot answers; it is shown here when it does, Ctrl-C ends")
        if once:
            return
        before, since = after, now


def look(sockets: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the status of each depot that answers, by its socket.

    Raises:
        UnavailableError: none answers.
    """
    found = answering(sockets)
    if not found:
        raise UnavailableError("no depot answers: `kvdepot depots` lists the running ones")
    return found


def answering(sockets: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the status of each depot that answers, by its socket."""
    asked = sockets or [one.socket for one in running_depots()]
    found = ((socket, read_status(socket)) for socket in asked)
    return {socket: status for socket, status in found if status is not None}


def hour_rate(history: bytes | None) -> float | None:
    """Returns the hit rate of all intervals of ``/history``; ``None`` without lookups, or from an older depot."""
    try:
        intervals = [] if history is None else json.loads(history)["intervals"]
        looked_up, hit = (sum(one[name] for one in intervals) for name in ("lookup_blocks", "lookup_hit_blocks"))
    except (ValueError, KeyError, TypeError):
        return None
    return hit / looked_up if looked_up else None


def is_same(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Returns whether both are of one depot: in a container every depot has the same process id."""
    return bool(then.get("pid") == now.get("pid") and then.get("uptime_s", 0) <= now.get("uptime_s", 0))


def rows(
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
    seconds: float,
    hours: Mapping[str, float | None],
) -> list[tuple[object, ...]]:
    """Returns a row for each depot that answered now, without rates if it did not answer before.

    ``hours`` has the hit rates of the last hour.
    """
    table = []
    for socket, stats in after.items():
        earlier = before.get(socket)
        if earlier is not None and not is_same(earlier, stats):
            earlier = None

        def rate(name: str, now: Mapping[str, Any] = stats, then: Mapping[str, Any] | None = earlier) -> float | None:
            if then is None:
                return None
            return max(0.0, float(now.get(name, 0) - then.get(name, 0)) / seconds)

        used = stats["pool_bytes"] - stats["pool_free_bytes"]
        stored, asked, missed = (rate(name) for name in ("dump_blocks_sealed", "load_blocks", "load_blocks_missed"))
        # What loads asked for includes what they missed.
        found = None if asked is None or missed is None else max(0.0, asked - missed)
        looked_up, hit = rate("lookup_blocks"), rate("lookup_hit_blocks")
        hits = (hit / looked_up if looked_up and hit is not None else None, hours.get(socket))
        sizes = [rate(name) for name in ("fetch_bytes", "write_bytes")]
        table.append(
            (
                stats["pid"],
                stats["pipeline"],
                f"{size_text(used)} of {size_text(stats['pool_bytes'])}",
                stats["pool_blocks"],
                stats["dirty_blocks"],
                *(None if one is None else f"{min(1.0, one):.1%}" for one in hits),
                *(None if one is None else f"{one:.0f}" for one in (stored, found, missed)),
                *(None if one is None else size_text(int(one)) for one in sizes),
                None if (evicted := rate("evict_blocks")) is None else f"{evicted:.0f}",
            )
        )
    return table
