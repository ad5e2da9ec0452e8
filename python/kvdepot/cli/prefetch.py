"""``kvdepot prefetch``: brings a namespace's blocks into a running depot's pool."""

import heapq
from itertools import chain

import click

from kvdepot import _native
from kvdepot.cli import targets
from kvdepot.cli.output import print_json
from kvdepot.cli.places import Places
from kvdepot.cli.progress import counted, counting
from kvdepot.cli.resolve import Resolved, namespace_of
from kvdepot.stored.blocks import block_files
from kvdepot.stored.served import POOL, list_blocks

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

    Slab and Dax tiers do not know when blocks were used: the last ones written are read first. Of a pool server or a
    bucket, the depot only knows the blocks that it has recently stored or found there.

    \b
    kvdepot prefetch 3f2a
    kvdepot prefetch 3f2a --limit 10000
    kvdepot prefetch 3f2a --config /etc/kvdepot.yaml
    """
    target = targets.find(file, socket, directories)
    target.check_running()
    found = namespace_of(target, namespace)
    with target.open(1) as depot:
        opened = found.open_with_tiers(depot)
        names = _newest(target, found, depot, opened, limit, quiet=as_json)
        store = depot.store(opened)
        with counting("blocks requested", len(names), hidden=as_json) as told:
            for first in range(0, len(names), BATCH):
                batch = names[first : first + BATCH]
                store.prefetch(batch)
                told(len(batch))
        store.close()
    if as_json:
        print_json({"namespace": found.root, "asked": len(names)})
        return
    click.echo(f"requested {len(names)} blocks of namespace {found.root}")
    if not names and not found.namespace.directories:
        click.echo("the depot knows no block of it outside of its pool")


def _newest(
    target: targets.Target,
    found: Resolved,
    depot: _native.Depot,
    opened: _native.Namespace,
    limit: int,
    *,
    quiet: bool,
) -> list[bytes]:
    """Returns the hashes of the last used blocks, the last written ones of media, or any that the depot lists."""
    if found.namespace.directories:
        files = counted(block_files(found.namespace), "block files found", hidden=quiet)
        newest = heapq.nlargest(limit, files, key=lambda one: one.used_unix_s)
        return [bytes.fromhex(one.hash) for one in newest]
    media, _ = Places((), target.media).open_media()
    blocks = (block for medium in media for block in medium.blocks(found.root))
    on_media = counted(blocks, "blocks found", hidden=quiet)
    written = [bytes.fromhex(one.hash) for one in heapq.nlargest(limit, on_media, key=lambda one: one.order)]
    if written:
        return written
    with counting("waiting for the depot's list", 0, hidden=quiet):
        listed = list_blocks(depot, opened)
    pool = set(listed.get(POOL, ()))
    below = chain.from_iterable(hashes for place, hashes in listed.items() if place != POOL)
    return [one for one in dict.fromkeys(below) if one not in pool][:limit]
