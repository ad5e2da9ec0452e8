"""``kvdepot export``: writes a namespace's blocks to one file."""

import dataclasses
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import click

from kvdepot.cli import places, targets
from kvdepot.cli.output import print_json
from kvdepot.cli.progress import counting, progress
from kvdepot.cli.resolve import Resolved, epoch_of, namespace_of
from kvdepot.errors import ConfigError
from kvdepot.stored.blocks import contents
from kvdepot.stored.served import export_served, list_blocks
from kvdepot.stored.unload import Exported, export_namespace

DRAIN_MS = 60_000
LOAD_MS = 60_000
LISTED = ("Slab", "Dax")
"""Tiers whose blocks a running depot lists completely."""


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
    """Writes the blocks of NAMESPACE (the first digits of a name) to FILE.

    They are read from the directories of the Posix tier, while depots may be running. A depot that uses these
    directories first writes the blocks that only its pool holds. Other tiers are not read then: FILE lacks blocks that
    only they hold. If no directory lists the namespace, the running depot is asked for its blocks: those of its pool
    and of Slab and Dax tiers, and those that it has recently stored on or found at a pool server or in a bucket. FILE
    lacks all others. The output names the tiers that were not read, or not completely (JSON: tiers_left_out).

    Each block's checksum is compared before the block is added to FILE; broken blocks are skipped and counted. FILE has
    a checksum for each block and one for the entire file, and it appears under its name only when it is complete. Only
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
        with target.open(1) as depot, counting("waiting for the depot to write", 0, hidden=as_json):
            written = depot.drain(DRAIN_MS)
    found = namespace_of(target, namespace)
    if found.namespace.directories:
        with counting("block files found", hidden=as_json) as told:
            total = contents(found.namespace, told).bytes
        with progress("export", total, hidden=as_json) as done:
            result = export_namespace(found.namespace, path, done)
    else:
        result = _from_depot(found, target, path, as_json)
    # A running depot lists all blocks of media.
    listed = () if found.namespace.directories else LISTED
    left_out = [tier for tier in target.lower_tiers if tier not in listed]
    if as_json:
        facts = {**dataclasses.asdict(result), "drained": written, "tiers_left_out": left_out}
        print_json({"namespace": found.root, "file": str(path), **facts})
    else:
        _print(found, path, result, written)
        _print_left_out(found, left_out)
    if result.broken or result.unreadable or not written:
        sys.exit(1)


def _from_depot(found: Resolved, target: targets.Target, path: Path, quiet: bool) -> Exported:
    with target.open(1) as depot:
        opened = found.open_with_tiers(depot)
        with counting("waiting for the depot's list", 0, hidden=quiet):
            hashes = list(dict.fromkeys(chain.from_iterable(list_blocks(depot, opened).values())))
        store = depot.store(opened, timeout_ms=LOAD_MS)
        with progress("export", len(hashes) * opened.block_bytes, hidden=quiet) as done:
            return export_served(
                store, found.namespace, hashes, path, epoch_now=lambda: epoch_of(target, found), done=done
            )


def _print(found: Resolved, path: Path, result: Exported, written: bool) -> None:
    click.echo(f"{path}: {result.blocks} blocks, {places.size_text(result.bytes)}, of namespace {found.root}")
    if not result.blocks and not result.broken and not result.unreadable:
        where = "in these directories" if found.namespace.directories else "that the depot can list"
        click.echo(f"the namespace has no blocks {where}, so the file holds only its description")
    if result.broken:
        click.echo(f"{result.broken} broken blocks were skipped: kvdepot verify lists them")
    if result.unreadable:
        what = "their files cannot be read" if found.namespace.directories else "the depot did not deliver them"
        click.echo(f"{result.unreadable} blocks were skipped because {what}: {result.trouble}")
    if result.gone:
        click.echo(f"{result.gone} blocks were evicted in the meantime")
    if not written:
        click.echo("the depot was still writing: blocks that only its pool held may be missing")


def _print_left_out(found: Resolved, left_out: Sequence[str]) -> None:
    if not left_out:
        return
    tiers = " and ".join(left_out)
    if found.namespace.directories:
        click.echo(f"not read: {tiers}. The file lacks blocks that only these tiers hold")
    else:
        click.echo(f"not completely read: {tiers}. The file lacks blocks there that the depot does not list")
