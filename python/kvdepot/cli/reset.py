"""``kvdepot reset``: makes a namespace's blocks unreachable in every tier."""

import json

import click

from kvdepot.cli import targets
from kvdepot.cli.output import print_json
from kvdepot.errors import UnavailableError


@click.command()
@click.argument("namespace")
@targets.options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(namespace: str, file: str | None, socket: str | None, directories: tuple[str, ...], as_json: bool) -> None:
    """Makes the running depot forget all blocks of NAMESPACE (the first digits of a name) in its pool and every tier.

    Use it if weights were replaced under the same name: no earlier block is served again, and later dumps are stored as
    usual. `kvdepot namespaces` lists the namespaces.

    \b
    kvdepot reset 3f2a
    kvdepot reset 3f2a --config /etc/kvdepot.yaml
    """
    target = targets.find(file, socket, directories)
    if target.running is None:
        raise UnavailableError(
            f"no depot runs with {', '.join(map(str, target.directories))}: name its --config or --socket, or start "
            "one with kvdepot serve"
        )
    found = targets.namespace_of(target, namespace)
    with target.open(1) as depot:
        depot.reset([depot.open_namespace(json.dumps(found.facts), targets.layout_json(found))])
    after = targets.namespace_of(target, found.root)
    if as_json:
        print_json({"namespace": found.root, "epoch": after.epoch})
    else:
        click.echo(f"namespace {found.root} was reset: epoch {after.epoch}")
