"""``kvdepot rm``: removes a namespace's blocks."""

import json
import sys

import click

from kvdepot.cli import targets
from kvdepot.cli.output import print_json
from kvdepot.cli.places import size_text
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

    If a depot is running with the directories, it resets the namespace: the blocks are immediately unreachable in its
    pool and every tier, and their files are removed in the background. Otherwise this command removes the files of the
    Posix tier.

    \b
    kvdepot rm 3f2a
    kvdepot rm 3f2a --config /etc/kvdepot.yaml --yes
    """
    target = targets.find(file, socket, directories)
    found = targets.namespace_of(target, namespace)
    held = contents(found)
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise ConfigError("rm: asks for confirmation before it removes blocks: add --yes if there is no terminal")
        question = f"remove {held.blocks} blocks, {size_text(held.bytes)}, of namespace {found.root}?"
        click.confirm(question, abort=True)
        # Somebody may have started a depot, or ended it, before the answer.
        target = targets.find(file, socket, directories)
        found = targets.namespace_of(target, found.root)
    if target.running is not None:
        with target.open(1) as depot:
            depot.reset([depot.open_namespace(json.dumps(found.facts), targets.layout_json(found))])
        removed, freed = held.blocks, held.bytes
    else:
        try:
            removed, freed = remove_blocks(found)
        except OSError as error:
            raise storage_error(error, "removed") from error
    if as_json:
        how = "reset" if target.running is not None else "removed"
        print_json({"namespace": found.root, "blocks": removed, "bytes": freed, "how": how})
    else:
        click.echo(f"namespace {found.root}: {removed} blocks, {size_text(freed)}, removed from {target.text}")
