"""``kvdepot ls``: the blocks of a namespace."""

import dataclasses
import heapq
from datetime import datetime, timezone

import click

from kvdepot.cli import places
from kvdepot.cli.output import print_json, print_table
from kvdepot.errors import ConfigError
from kvdepot.stored.blocks import block_files


@click.command()
@click.argument("namespace")
@places.options
@click.option(
    "--sort",
    "order",
    type=click.Choice(["age", "recent", "size"]),
    default="recent",
    show_default=True,
    help="Order: least recently used first (age), most recently used first (recent), or largest first (size).",
)
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Maximum number of blocks.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    namespace: str, file: str | None, directories: tuple[str, ...], order: str, limit: int, as_json: bool
) -> None:
    """Lists the blocks of NAMESPACE (the first digits of a name) in the Posix tier's directories.

    It needs no running depot. Blocks that only a pool or another tier holds are not listed.

    \b
    kvdepot ls 3f2a
    kvdepot ls 3f2a --sort age --limit 100
    """
    found = places.one_namespace(places.stored_namespaces(file, directories), namespace)
    if found.problem:
        raise ConfigError(f"namespace {found.root} cannot be read: {found.problem}")
    keys = {"age": lambda one: one.used_unix_s, "recent": lambda one: -one.used_unix_s, "size": lambda one: -one.bytes}
    files = list(block_files(found))
    count, total = len(files), sum(one.bytes for one in files)
    shown = heapq.nsmallest(limit, files, key=keys[order])
    if as_json:
        blocks = [{**dataclasses.asdict(one), "path": str(one.path)} for one in shown]
        print_json({"namespace": found.root, "blocks": count, "bytes": total, "shown": blocks})
        return
    print_table(
        ["block", "size", "last used", "at"],
        [
            (
                one.hash,
                places.size_text(one.bytes),
                places.age_text(one.used_unix_s),
                f"{datetime.fromtimestamp(one.used_unix_s, tz=timezone.utc):%Y-%m-%dT%H:%M:%SZ}",
            )
            for one in shown
        ],
    )
    click.echo(f"{len(shown)} of {count} blocks, {places.size_text(total)} in total")
