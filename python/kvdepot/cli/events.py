"""``kvdepot events``: prints what a depot can serve."""

import json

import click

from kvdepot.config import load_config
from kvdepot.events import BlockEvent, BlockEvents


@click.command()
@click.option("--config", "file", type=click.Path(dir_okay=False), help="Configuration file; defaults without one.")
@click.option("--socket", type=click.Path(), help="Unix socket; made from the configuration when left out.")
@click.option("--block-bytes", type=click.IntRange(min=1), help="Bytes of a block, as for serve.")
@click.option("--follow", is_flag=True, help="Go on with what changes, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line.")
def command(file: str | None, socket: str | None, block_bytes: int | None, follow: bool, as_json: bool) -> None:
    """Prints the blocks of a running depot, pool and every tier, and with --follow what changes from then on.

    A line names how many blocks of a namespace became readable in a place, or stopped being so; --json adds hashes.

    \b
    kvdepot events --json
    kvdepot events --follow
    """
    if socket is None:
        socket = load_config(file, owns_pool=False).socket_path(block_bytes)
    with BlockEvents(socket) as events:
        for event in events if follow else events.content():
            click.echo(line(event, as_json))


def line(event: BlockEvent, as_json: bool) -> str:
    """Returns an event as a line of text."""
    what = "stored" if event.stored else "removed"
    if as_json:
        hashes = [one.hex() for one in event.hashes]
        return json.dumps({"event": what, "namespace": event.namespace, "place": event.place, "hashes": hashes})
    return f"{event.namespace} {event.place} {what} {len(event.hashes)}"
