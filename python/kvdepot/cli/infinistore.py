"""The command ``infinistore``, which ``kvdepot compat install infinistore`` creates: runs ``kvdepot serve``."""

import sys
from collections.abc import Sequence

import click

from kvdepot.cli import main as kvdepot
from kvdepot.cli.wire import SERVICE_PORT


def arguments_of_serve(arguments: Sequence[str]) -> list[str]:
    """Returns options of ``kvdepot serve``: the given ones, and the network listener's port, which opens it."""
    given = list(arguments)
    if not any(one == "--service-port" or one.startswith("--service-port=") for one in given):
        given += ["--service-port", str(SERVICE_PORT)]
    return ["serve", *given]


def main() -> None:
    """Runs a server for InfiniStore's clients, with InfiniStore's options and those of ``kvdepot serve``."""
    given = sys.argv[1:]
    if not any(one.split("=")[0] in ("--host", "--help", "-h") for one in given):
        click.echo(
            "infinistore: this is kvdepot, which listens on 127.0.0.1 unless --host says otherwise; for clients on "
            "other machines add --host 0.0.0.0, and a --token-file or certificate if the clients support it",
            err=True,
        )
    kvdepot(args=arguments_of_serve(given), prog_name="infinistore")
