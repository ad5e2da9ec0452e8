"""``kvdepot events --publish``: publishes a depot's KV events over ZMQ, as vLLM does."""

import importlib
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from kvdepot.errors import ConfigError, UnsupportedError
from kvdepot.events import BlockEvents

F = TypeVar("F", bound=Callable[..., Any])

NAMESPACE = re.compile(r"[0-9a-f]{8,32}")
TOPIC_BYTES_MAX = 1024

OPTIONS = (
    click.option(
        "--publish",
        metavar="ENDPOINT",
        help="Publish over ZMQ in vLLM's format until SIGTERM or Ctrl-C, such as `tcp://*:5557`. As in vLLM, "
        "addresses with * or :: and ipc:// are bound, others are connected to.",
    ),
    click.option("--replay", metavar="ENDPOINT", help="Listen here for subscribers that ask for missed batches."),
    click.option("--topic", default="", help="First frame of each batch, such as kv@POD@MODEL; default: empty."),
    click.option("--bind", is_flag=True, help="Bind the address of --publish, whatever it is."),
    click.option(
        "--namespace",
        "namespaces",
        multiple=True,
        metavar="NAME[,NAME…]",
        help="Publish these namespaces only: those of all ranks of an engine, separated by commas. A block counts when "
        "all ranks have it. Repeat it for each KV cache group of a hybrid model, in vLLM's order. 8 digits of a "
        "name or more.",
    ),
    click.option(
        "--block-hashes",
        type=click.Choice(["int", "bytes"]),
        default="int",
        show_default=True,
        help="Form of block hashes: the last 8 bytes as a number, or the last 16 bytes.",
    ),
    click.option(
        "--data-parallel-rank",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Number that each batch carries.",
    ),
    click.option(
        "--buffer-batches",
        type=click.IntRange(1, 1_000_000),
        default=10_000,
        show_default=True,
        help="Batches that are kept for --replay. Older ones are replaced by the contents.",
    ),
    click.option(
        "--hwm",
        type=click.IntRange(1, 1_000_000),
        default=10_000,
        show_default=True,
        help="Batches that wait for a slow subscriber; it misses the others.",
    ),
    click.option(
        "--repeat-s",
        type=click.FloatRange(min=0),
        default=0,
        show_default=True,
        help="Publish the whole contents again after so many seconds, for subscribers without --replay; 0 = never.",
    ),
    click.option(
        "--no-clear",
        is_flag=True,
        help="Never publish AllBlocksCleared, for a topic that an engine publishes, too.",
    ),
)


def options(command: F) -> F:
    """Adds the options of a publisher to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def check(said: Mapping[str, Any]) -> bool:
    """Returns whether to publish.

    Raises:
        ConfigError: an option of the publisher is given without ``--publish``.
    """
    if said["publish"] is not None:
        return True
    context = click.get_current_context()
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in said
        and context.get_parameter_source(parameter.name) is not click.core.ParameterSource.DEFAULT
    ]
    if given:
        raise ConfigError(f"{given[0]}: belongs to --publish: add --publish ENDPOINT, such as tcp://*:5557")
    return False


def run(socket: str, said: Mapping[str, Any], as_json: bool) -> None:
    """Publishes until a signal.

    Raises:
        ConfigError: an option has a wrong value.
        UnavailableError: an address cannot be bound.
        UnsupportedError: pyzmq or msgspec is missing.
    """
    try:
        sockets_of, wire = (importlib.import_module(f"kvdepot.publish.{name}") for name in ("sockets", "wire"))
    except ModuleNotFoundError as missing:
        raise UnsupportedError(
            f"--publish needs the Python packages msgspec and pyzmq, and {missing.name} is missing: "
            "pip install 'kvdepot[events]'"
        ) from missing
    from kvdepot.publish.contents import Contents
    from kvdepot.publish.publisher import Publisher
    from kvdepot.publish.stream import EventStream, first_sequence

    groups = groups_of(said["namespaces"])
    topic = said["topic"]
    if len(topic.encode()) > TOPIC_BYTES_MAX:
        raise ConfigError(f"--topic: {len(topic.encode())} bytes; at most {TOPIC_BYTES_MAX} are possible")
    publish = sockets_of.endpoint("--publish", said["publish"], said["bind"])
    replay = said["replay"] and sockets_of.endpoint("--replay", said["replay"], binds=True)
    stop = threading.Event()
    _stop_on_signals(stop)
    encoder = wire.BatchEncoder(said["block_hashes"], said["data_parallel_rank"], tells_group=len(groups) > 1)
    first = first_sequence(time.time_ns() // 1_000_000)
    stream = EventStream(
        Contents(groups),
        encoder,
        first=first,
        batches_kept=said["buffer_batches"] if replay else 1,
        clears=not said["no_clear"],
    )
    with BlockEvents(socket, needs_depot=False) as events:
        sockets = sockets_of.Sockets(publish, replay or None, topic, said["hwm"])
        try:
            started = {
                "publish": sockets.publish_address,
                "replay": sockets.replay_address,
                "topic": topic,
                "socket": socket,
                "namespaces": [",".join(group) for group in groups],
                "first_sequence": first,
            }
            report = _report_json if as_json else _report_text
            report("publishing", started)
            Publisher(events, stream, sockets, report, said["repeat_s"]).run(stop)
        finally:
            sockets.close()


def groups_of(said: tuple[str, ...]) -> list[list[str]]:
    """Returns the namespaces of each group.

    Raises:
        ConfigError: a name is not 8 to 32 hexadecimal digits, or occurs twice.
    """
    groups = [group.split(",") for group in said]
    names = [name for group in groups for name in group]
    for name in names:
        if not NAMESPACE.fullmatch(name):
            raise ConfigError(
                f"--namespace: {name!r} is not 8 to 32 hexadecimal digits: `kvdepot events` and `kvdepot namespaces` "
                "list the names"
            )
    for at, name in enumerate(names):
        if any(name.startswith(other) or other.startswith(name) for other in names[:at]):
            raise ConfigError(f"--namespace: {name} is listed twice: name each namespace once")
    return groups


def _report_json(what: str, values: Mapping[str, Any]) -> None:
    click.echo(json.dumps({"status": what, **values}))


def _report_text(what: str, values: Mapping[str, Any]) -> None:
    def text(value: object) -> object:
        if isinstance(value, Mapping):
            return ", ".join(f"{name} {count}" for name, count in value.items()) or 0
        return ", ".join(map(str, value)) if isinstance(value, list) else value

    said = "; ".join(f"{name} {text(value)}" for name, value in values.items() if value not in (None, "", []))
    click.echo(f"{what}: {said}" if said else what)


def _stop_on_signals(stop: threading.Event) -> None:
    """Makes SIGTERM, SIGINT and SIGHUP end the publisher in order, with status 0."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # nohup ignores SIGHUP, a shell ignores SIGINT for background jobs.
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: stop.set())
