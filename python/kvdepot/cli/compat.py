"""``kvdepot compat``: names of other projects that existing launch commands use."""

import click

from kvdepot import compat
from kvdepot.cli.output import print_json, print_table

NAME = click.argument("name", type=click.Choice(sorted(compat.SHIMS)))
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def command() -> None:
    """Installs and removes names of other projects that existing launch commands use.

    No name is installed by default, and none is installed over the real package. Remove them before you uninstall
    kvdepot.

    \b
    kvdepot compat install infinistore
    kvdepot compat remove infinistore
    """


@command.command()
@NAME
@JSON
def install(name: str, as_json: bool) -> None:
    """Installs a name into this environment.

    \b
    kvdepot compat install ucm
    """
    written = [str(path) for path in compat.install(compat.SHIMS[name])]
    if as_json:
        print_json({"name": name, "written": written})
        return
    for path in written:
        click.echo(f"written: {path}")


@command.command()
@NAME
@JSON
def remove(name: str, as_json: bool) -> None:
    """Removes the files that install has written, and nothing else.

    \b
    kvdepot compat remove ucm
    """
    gone = [str(path) for path in compat.remove(compat.SHIMS[name])]
    if as_json:
        print_json({"name": name, "removed": gone})
        return
    for path in gone:
        click.echo(f"removed: {path}")
    if not gone:
        click.echo(f"{name} is not installed")


@command.command(name="list")
@JSON
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
