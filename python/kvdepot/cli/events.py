"""``kvdepot events``: prints or publishes what a depot can serve."""

import json

import click

from kvdepot.config import load_config
from kvdepot.errors import config_error
from kvdepot.events import BlockEvent, BlockEvents


@click.command()
@click.option("--config", "file", type=click.Path(dir_okay=False), help="Configuration file; defaults without one.")
@click.option("--socket", type=click.Path(), help="Unix socket; made from the configuration when left out.")
@click.option("--block-bytes", type=click.IntRange(min=1), help="Bytes of a block, as for serve.")
@click.option("--follow", is_flag=True, help="Go on with what changes, until Ctrl-C.")
@click.option("--publish", metavar="ENDPOINT", help="Publish to vLLM's subscribers instead, as in tcp://*:5557.")
@click.option("--replay", metavar="ENDPOINT", help="With --publish: where subscribers ask for batches they missed.")
@click.option("--topic", default="", help="With --publish: topic of the messages.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line.")
def command(
    file: str | None,
    socket: str | None,
    block_bytes: int | None,
    follow: bool,
    publish: str | None,
    replay: str | None,
    topic: str,
    as_json: bool,
) -> None:
    """Prints the blocks of a running depot, pool and every tier, and with --follow what changes from then on.

    A line names how many blocks of a namespace became readable in a place, or stopped being so; --json has their hashes.
    With --publish the events go to a ZeroMQ endpoint in the wire format of vLLM's KV events (docs/events.md); this needs
    `pip install kvdepot[events]`.

    \b
    kvdepot events --json
    kvdepot events --follow
    kvdepot events --publish tcp://*:5557 --replay tcp://*:5558
    """
    if publish is None and (replay is not None or topic):
        raise config_error("--replay and --topic: only with --publish")
    if publish is not None and as_json:
        raise config_error("--json: not with --publish, which prints nothing")
    if socket is None:
        socket = load_config(file, owns_pool=False).socket_path(block_bytes)
    with BlockEvents(socket) as events:
        if publish is not None:
            from kvdepot.events_zmq import publish_events

            publish_events(events, publish, replay, topic)
        for event in events if follow else events.content():
            click.echo(line(event, as_json))


def line(event: BlockEvent, as_json: bool) -> str:
    """Returns an event as a line of text."""
    what = "stored" if event.stored else "removed"
    if as_json:
        hashes = [one.hex() for one in event.hashes]
        return json.dumps({"event": what, "namespace": event.namespace, "place": event.place, "hashes": hashes})
    return f"{event.namespace} {event.place} {what} {len(event.hashes)}"
