"""``kvdepot stat``: shows a depot's content and counters."""

import json
from collections.abc import Iterator

import click

from kvdepot import _native
from kvdepot.cli.output import print_json, print_table
from kvdepot.cli.places import size_text
from kvdepot.cli.running import BLOCK_BYTES, WAIT_MS, peer_pid
from kvdepot.config import load_config
from kvdepot.errors import UnavailableError


@click.command()
@click.option("--config", "file", type=click.Path(dir_okay=False), help="Configuration file; default: the defaults.")
@click.option("--socket", type=click.Path(), help="Unix socket; default: derived from the configuration.")
@BLOCK_BYTES
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(file: str | None, socket: str | None, block_bytes: int | None, as_json: bool) -> None:
    """Shows the counters and gauges of a running depot, found by its configuration, as engines find it.

    Counters count since the depot started. Sizes are rounded: --json has all digits, and the histograms of the tiers'
    times.

    \b
    kvdepot stat
    kvdepot stat --config /etc/kvdepot.yaml
    kvdepot stat --socket /run/user/1000/kvdepot/depot-0123456789ab.sock --json
    """
    if socket is None:
        socket = load_config(file, owns_pool=False).socket_path(block_bytes)
    absent = UnavailableError(f"no depot answers on {socket}: start one with kvdepot serve, or name its --socket")
    if peer_pid(str(socket)) is None:
        raise absent
    depot = _native.Depot.connect(socket, None, wait_ms=WAIT_MS, call_timeout_ms=WAIT_MS)
    try:
        if not depot.attached:
            raise absent
        stats = json.loads(depot.stats_json())
    finally:
        depot.close()
    if as_json:
        print_json(stats)
    else:
        rows = ((name, value) for name, value in flat(stats) if ".buckets." not in name)
        print_table(["name", "value"], ((name, shown(name, value)) for name, value in rows))


def flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Flattens nested objects and lists into ``(dotted name, value)`` rows, in the order of the depot.

    The entries of a list have their numbers as names, from 0. An empty object or list is a row without a value.
    """
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))
    else:
        yield name, value
        return
    if not inside:
        yield name, None
    for key, inner in inside:
        yield from flat(inner, f"{name}.{key}" if name else str(key))


def shown(name: str, value: object) -> object:
    """Returns the value of a row for people: numbers of bytes with their unit."""
    is_size = "bytes" in name.rpartition(".")[2].split("_")
    return size_text(value) if is_size and isinstance(value, int) else value
