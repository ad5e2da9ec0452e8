"""``kvdepot compat``: names of other projects that existing launch commands use."""

import click

from kvdepot import compat
from kvdepot.cli.output import print_json, print_table

NAME = click.argument("name", type=click.Choice(sorted(compat.SHIMS)))


@click.group()
def command() -> None:
    """Installs and removes names of other projects that existing launch commands use.

    No name is installed by default, and none is installed over the real package. Remove them before you uninstall
    kvdepot.
    """


@command.command()
@NAME
def install(name: str) -> None:
    """Installs a name into this environment.

    \b
    kvdepot compat install ucm
    """
    for path in compat.install(compat.SHIMS[name]):
        click.echo(f"written: {path}")


@command.command()
@NAME
def remove(name: str) -> None:
    """Removes the files that install has written, and nothing else.

    \b
    kvdepot compat remove ucm
    """
    gone = compat.remove(compat.SHIMS[name])
    for path in gone:
        click.echo(f"removed: {path}")
    if not gone:
        click.echo(f"{name} is not installed")


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(as_json: bool) -> None:
    """Lists the names, and whether they are installed.

    \b
    kvdepot compat list
    """
    rows = [(shim.name, shim.is_installed(), shim.gives) for shim in compat.SHIMS.values()]
    if as_json:
        print_json([{"name": name, "installed": there, "gives": gives} for name, there, gives in rows])
    else:
        print_table(["name", "installed", "gives"], rows)
