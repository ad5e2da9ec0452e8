"""``kvdepot prefetch``: brings a namespace's blocks into a running depot's pool."""

import heapq
import json

import click

from kvdepot.cli import targets
from kvdepot.cli.output import print_json
from kvdepot.errors import UnavailableError
from kvdepot.stored.blocks import block_files

BATCH = 1024


@click.command()
@click.argument("namespace")
@targets.options
@click.option("--limit", type=click.IntRange(min=1), default=1024, show_default=True, help="Maximum number of blocks.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    namespace: str, file: str | None, socket: str | None, directories: tuple[str, ...], limit: int, as_json: bool
) -> None:
    """Asks the running depot to read the most recently used blocks of NAMESPACE into its pool. It does not wait.

    \b
    kvdepot prefetch 3f2a
    kvdepot prefetch 3f2a --limit 10000
    """
    target = targets.find(file, socket, directories)
    if target.running is None:
        raise UnavailableError("no depot runs with these directories: there is no pool to read blocks into")
    found = targets.namespace_of(target, namespace)
    newest = heapq.nlargest(limit, block_files(found), key=lambda one: one.used_unix_s)
    names = [bytes.fromhex(one.hash) for one in newest]
    with target.open(1) as depot:
        store = depot.store(depot.open_namespace(json.dumps(found.facts), targets.layout_json(found)))
        for first in range(0, len(names), BATCH):
            store.prefetch(names[first : first + BATCH])
        store.close()
    if as_json:
        print_json({"namespace": found.root, "asked": len(names)})
    else:
        click.echo(f"requested {len(names)} blocks of namespace {found.root}")
