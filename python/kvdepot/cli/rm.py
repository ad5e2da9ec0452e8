"""``kvdepot rm``: removes a namespace's blocks."""

import sys

import click

from kvdepot.cli import targets
from kvdepot.cli.output import print_json
from kvdepot.cli.places import size_text
from kvdepot.cli.progress import counting
from kvdepot.cli.resolve import Resolved, namespace_of
from kvdepot.errors import ConfigError, storage_error
from kvdepot.stored.blocks import contents
from kvdepot.stored.gc import remove_blocks


@click.command()
@click.argument("namespace")
@targets.options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; needs --yes.")
def command(
    namespace: str, file: str | None, socket: str | None, directories: tuple[str, ...], yes: bool, as_json: bool
) -> None:
    """Removes all blocks of NAMESPACE (the first digits of a name).

    If a depot is running, it resets the namespace: the blocks are immediately unreachable in its pool and every tier,
    and they are removed there in the background. Otherwise this command removes the files of the Posix tier, if that is
    the only tier: with others (of --config) it refuses, and removes nothing, because only a depot can remove blocks
    there. --directory alone names no other tiers. The numbers of blocks and bytes are those of the directories, and
    without directories those of the depot's pool.

    \b
    kvdepot rm 3f2a
    kvdepot rm 3f2a --config /etc/kvdepot.yaml --yes
    kvdepot rm 3f2a --socket /run/user/1000/kvdepot/depot-0123456789ab.sock --yes
    """
    target = targets.find(file, socket, directories)
    found = namespace_of(target, namespace, removes=True)
    _check_reach(target, found)
    where, held_blocks, held_bytes = _held(found, as_json)
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise ConfigError("rm: asks for confirmation before it removes blocks: add --yes if there is no terminal")
        question = f"remove {held_blocks} blocks, {size_text(held_bytes)}{where}, of namespace {found.root}?"
        click.confirm(question, abort=True)
        # Somebody may have started a depot, or ended it, before the answer.
        target = targets.find(file, socket, directories)
        found = namespace_of(target, found.root, removes=True)
        _check_reach(target, found)
        where, held_blocks, held_bytes = _held(found, as_json)
    if target.running is not None:
        with target.open(1) as depot, counting("waiting for the reset", 0, hidden=as_json):
            depot.reset([found.open_in(depot)])
        removed, freed = held_blocks, held_bytes
    else:
        try:
            with counting("block files removed", hidden=as_json) as told:
                removed, freed = remove_blocks(found.namespace, told)
        except OSError as error:
            raise storage_error(error, "removed") from error
    if as_json:
        how = "reset" if target.running is not None else "removed"
        print_json({"namespace": found.root, "blocks": removed, "bytes": freed, "how": how})
    else:
        click.echo(f"namespace {found.root}: {removed} blocks, {size_text(freed)}{where}, removed from {target.text}")


def _check_reach(target: targets.Target, found: Resolved) -> None:
    """Raises ``ConfigError`` if blocks would stay in tiers that only a depot can reach."""
    if target.running is None and (lower := target.lower_tiers):
        raise ConfigError(
            f"rm: no depot runs, so the blocks of namespace {found.root} would stay in {' and '.join(lower)}, and the "
            "next depot would serve them again. Nothing was removed: start the depot with kvdepot serve, then run "
            "kvdepot rm again, or kvdepot reset"
        )


def _held(found: Resolved, quiet: bool) -> tuple[str, int, int]:
    """Returns where blocks can be counted, in words that follow their size, their number, and their bytes."""
    if not found.namespace.directories and found.known is not None:
        return " in the pool, and all in other tiers", found.known.pool_blocks, found.known.pool_bytes
    with counting("block files found", hidden=quiet) as told:
        held = contents(found.namespace, told)
    return "", held.blocks, held.bytes
