"""``kvdepot events``: prints the blocks of a depot, and how they change."""

import json
from typing import Any

import click

from kvdepot.cli import events_publish
from kvdepot.cli.running import BLOCK_BYTES
from kvdepot.config import load_config
from kvdepot.errors import ConfigError
from kvdepot.events import BlockEvent, BlockEvents


@click.command()
@click.option("--config", "file", type=click.Path(dir_okay=False), help="Configuration file; default: the defaults.")
@click.option("--socket", type=click.Path(), help="Unix socket; made from the configuration when left out.")
@BLOCK_BYTES
@click.option("--follow", is_flag=True, help="Then print each change, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@events_publish.options
def command(
    file: str | None,
    socket: str | None,
    block_bytes: int | None,
    follow: bool,
    as_json: bool,
    **said: Any,
) -> None:
    """Prints the blocks of a running depot, in the pool and in each tier.

    With --follow, it then prints each change.

    Each line says how many blocks of a namespace became readable in a place, or stopped being readable there.
    --json adds their hashes.

    With --publish, routers can subscribe to the same events over ZMQ, as to those of a vLLM. It waits for a depot and
    for the next one after it, and ends with status 0 at SIGTERM or Ctrl-C. It prints what it publishes and where, with
    --json as an object per line. It needs the packages of the extra kvdepot[events]. The other options belong to it.

    \b
    kvdepot events --json
    kvdepot events --follow
    kvdepot events --publish ipc:///run/kv-events --replay ipc:///run/kv-replay
    """
    publishes = events_publish.check(said)
    if publishes and follow:
        raise ConfigError("--follow: --publish follows anyway: use one of them")
    if socket is None:
        socket = load_config(file, owns_pool=False).socket_path(block_bytes)
    if publishes:
        events_publish.run(socket, said, as_json)
        return
    with BlockEvents(socket) as events:
        try:
            for event in events if follow else events.content():
                click.echo(line(event, as_json))
        except KeyboardInterrupt:
            if not follow:
                raise
            # The terminal shows ^C on this line.
            click.echo(err=True)


def line(event: BlockEvent, as_json: bool) -> str:
    """Returns an event as a line of text."""
    what = "stored" if event.stored else "removed"
    if as_json:
        hashes = [one.hex() for one in event.hashes]
        return json.dumps({"event": what, "namespace": event.namespace, "place": event.place, "hashes": hashes})
    return f"{event.namespace} {event.place} {what} {len(event.hashes)}"
