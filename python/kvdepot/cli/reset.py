"""``kvdepot reset``: makes a namespace's blocks unreachable in every tier."""

import click

from kvdepot.cli import targets
from kvdepot.cli.output import print_json
from kvdepot.cli.resolve import namespace_of
from kvdepot.errors import KVDepotError


@click.command()
@click.argument("namespace")
@targets.options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(namespace: str, file: str | None, socket: str | None, directories: tuple[str, ...], as_json: bool) -> None:
    """Makes the running depot forget all blocks of NAMESPACE (the first digits of a name) in its pool and every tier.

    Use it if weights were replaced under the same name: no earlier block is served again, and later dumps are stored as
    usual. NAMESPACE is found in the directories of the Posix tier, or else at the depot, which knows all namespaces
    that were opened since it started. `kvdepot namespaces` lists those in the directories, or, without a Posix
    tier, those at the depot; with --socket it lists both.

    \b
    kvdepot reset 3f2a
    kvdepot reset 3f2a --config /etc/kvdepot.yaml
    kvdepot reset 3f2a --socket /run/user/1000/kvdepot/depot-0123456789ab.sock
    """
    target = targets.find(file, socket, directories)
    target.check_running()
    found = namespace_of(target, namespace, removes=True)
    with target.open(1) as depot:
        depot.reset([found.open_in(depot)])
        epoch, trouble = _epoch_now(target, found.root)
    if as_json:
        print_json({"namespace": found.root, "epoch": epoch})
    else:
        click.echo(f"namespace {found.root} was reset" + ("" if epoch is None else f": epoch {epoch}"))
    if epoch is None:
        click.echo(f"its new epoch cannot be shown: {trouble}", err=True)


def _epoch_now(target: targets.Target, root: str) -> tuple[int | None, str]:
    """Returns the epoch after a reset, or ``None`` and why it is not known: the reset has succeeded all the same."""
    try:
        return namespace_of(target, root).namespace.epoch, ""
    except KVDepotError as error:
        return None, str(error)
