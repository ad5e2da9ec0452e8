"""``kvdepot gc``: removes what no depot will read again from a stopped depot's directories."""

import dataclasses
import sys
from collections import Counter

import click

from kvdepot.cli.output import print_json, print_table
from kvdepot.cli.places import chosen_directories, size_text
from kvdepot.cli.progress import progress
from kvdepot.cli.running import user_of
from kvdepot.errors import BusyError, StorageError, config_error
from kvdepot.stored.gc import Garbage, find_garbage, remove

SHOWN = 20


@click.command()
@click.argument("directories", nargs=-1, metavar="[DIR]...", type=click.Path(file_okay=False))
@click.option("--config", "file", type=click.Path(dir_okay=False), help="Configuration file that names directories.")
@click.option("--dry-run", is_flag=True, help="Only say what would go; so it is without --apply.")
@click.option("--apply", "apply_", is_flag=True, help="Remove it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(directories: tuple[str, ...], file: str | None, dry_run: bool, apply_: bool, as_json: bool) -> None:
    r"""Finds what a stopped depot's directories hold in vain, and why; --apply removes it.

    That is: blocks of earlier epochs, broken blocks that were set aside, temporary files older than an hour, blocks
    without a description, and namespaces without blocks. Blocks that a depot would find stay, and so does what says
    that a namespace was reset. Exit status 1 when something cannot be removed, or a depot uses the directories.

    \b
    kvdepot gc /mnt/nvme0/kvdepot
    kvdepot gc --config /etc/kvdepot.yaml --apply
    """
    if apply_ and dry_run:
        raise config_error("--dry-run: removes nothing, and --apply does: use one of them")
    places = chosen_directories(file, directories)
    user = user_of(places)
    if apply_ and user is not None:
        busy = BusyError(f"the depot on {user.socket} (pid {user.pid}) uses these directories: kvdepot stop ends it")
        busy.kind = "busy"
        raise busy
    try:
        found = list(find_garbage(places))
    except OSError as error:
        failure = StorageError(f"{error.filename}: cannot be read: {error.strerror}")
        failure.kind = "io"
        raise failure from error
    freed, failures = _remove(found) if apply_ else (0, [])
    if as_json:
        rows = [{**dataclasses.asdict(one), "path": str(one.path)} for one in found]
        total = sum(one.bytes for one in found)
        print_json({"found": rows, "bytes": total, "removed": apply_, "freed_bytes": freed, "failures": failures})
    else:
        _print(found, freed if apply_ else None)
        if user is not None:
            click.echo(f"the depot on {user.socket} uses these directories: stop it before --apply")
        for text in failures:
            click.echo(f"error: {text}", err=True)
    if failures:
        sys.exit(1)


def _remove(found: list[Garbage]) -> tuple[int, list[str]]:
    """The bytes that were freed, and what could not be removed."""
    freed, failures = 0, []
    with progress("gc", sum(one.bytes for one in found), hidden=False) as done:
        for one in found:
            try:
                freed += remove(one)
            except OSError as error:
                failures.append(f"{error.filename or one.path}: cannot be removed: {error.strerror}")
            done(one.bytes)
    return freed, failures


def _print(found: list[Garbage], freed: int | None) -> None:
    by_kind = Counter(one.kind for one in found)
    sizes = {kind: sum(one.bytes for one in found if one.kind == kind) for kind in by_kind}
    print_table(["what", "how many", "size"], [(kind, by_kind[kind], size_text(sizes[kind])) for kind in by_kind])
    for one in found[:SHOWN]:
        click.echo(f"{one.path}: {one.kind}, {size_text(one.bytes)}: {one.why}")
    if len(found) > SHOWN:
        click.echo(f"… and {len(found) - SHOWN} more: --json lists all")
    if freed is None:
        click.echo(f"{size_text(sum(sizes.values()))} would be freed: --apply does it")
    else:
        click.echo(f"{size_text(freed)} freed")
