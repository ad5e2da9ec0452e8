"""``kvdepot export``: writes a namespace's blocks to one file."""

import dataclasses
import sys
from pathlib import Path

import click

from kvdepot.cli import places, targets
from kvdepot.cli.output import print_json
from kvdepot.cli.progress import progress
from kvdepot.errors import ConfigError
from kvdepot.stored.blocks import contents
from kvdepot.stored.namespaces import StoredNamespace
from kvdepot.stored.unload import Exported, export_namespace

DRAIN_MS = 60_000


@click.command()
@click.argument("namespace")
@click.argument("file_out", metavar="FILE", type=click.Path(dir_okay=False))
@targets.options
@click.option("--force", is_flag=True, help="Replace FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    namespace: str,
    file_out: str,
    file: str | None,
    socket: str | None,
    directories: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Writes the blocks of NAMESPACE (the first digits of a name) from the Posix tier's directories to FILE.

    Depots may be running. A depot that uses these directories first writes the blocks that only its pool holds. Each
    block's checksum is compared before the block is added to FILE; broken blocks are skipped and counted. FILE has a
    checksum for each block and one for the entire file, and it appears under its name only when it is complete. Only
    this user can read it.

    The exit status is 1 if FILE lacks blocks: broken or unreadable ones, or those that the depot has not written within
    a minute. Blocks that are evicted in the meantime do not count.

    \b
    kvdepot export 3f2a llama.kvx
    kvdepot export 3f2a llama.kvx --config /etc/kvdepot.yaml --force
    """
    path = Path(file_out)
    if path.exists() and not force:
        raise ConfigError(f"{path}: already exists: name another file, or add --force")
    target = targets.find(file, socket, directories)
    written = True
    if target.running is not None:
        with target.open(1) as depot:
            written = depot.drain(DRAIN_MS)
    found = targets.namespace_of(target, namespace)
    with progress("export", contents(found).bytes, hidden=as_json) as done:
        result = export_namespace(found, path, done)
    if as_json:
        print_json({"namespace": found.root, "file": str(path), **dataclasses.asdict(result), "drained": written})
    else:
        _print(found, path, result, written)
    if result.broken or result.unreadable or not written:
        sys.exit(1)


def _print(found: StoredNamespace, path: Path, result: Exported, written: bool) -> None:
    click.echo(f"{path}: {result.blocks} blocks, {places.size_text(result.bytes)}, of namespace {found.root}")
    if not result.blocks and not result.broken and not result.unreadable:
        click.echo("the namespace has no blocks in these directories, so the file holds only its description")
    if result.broken:
        click.echo(f"{result.broken} broken blocks were skipped: kvdepot verify lists them")
    if result.unreadable:
        click.echo(f"{result.unreadable} blocks were skipped because their files cannot be read: {result.trouble}")
    if result.gone:
        click.echo(f"{result.gone} blocks were evicted in the meantime")
    if not written:
        click.echo("the depot was still writing: blocks that only its pool held may be missing")
