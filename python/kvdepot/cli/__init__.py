"""The command ``kvdepot``. A verb is a file of this package and a line in ``VERBS``."""

import importlib
import sys
from collections.abc import Mapping

import click

from kvdepot.errors import ConfigError, KVDepotError

VERBS: Mapping[str, str] = {
    "bench": "kvdepot.cli.bench",
    "compat": "kvdepot.cli.compat",
    "completion": "kvdepot.cli.completion",
    "config": "kvdepot.cli.config",
    "depots": "kvdepot.cli.depots",
    "doctor": "kvdepot.cli.doctor",
    "events": "kvdepot.cli.events",
    "export": "kvdepot.cli.export",
    "gc": "kvdepot.cli.gc",
    "import": "kvdepot.cli.import_",
    "inspect": "kvdepot.cli.inspect",
    "ls": "kvdepot.cli.ls",
    "namespaces": "kvdepot.cli.namespaces",
    "prefetch": "kvdepot.cli.prefetch",
    "reset": "kvdepot.cli.reset",
    "rm": "kvdepot.cli.rm",
    "serve": "kvdepot.cli.serve",
    "stat": "kvdepot.cli.stat",
    "stop": "kvdepot.cli.stop",
    "top": "kvdepot.cli.top",
    "trace": "kvdepot.cli.trace",
    "verify": "kvdepot.cli.verify",
    "why": "kvdepot.cli.why",
}
"""Verb -> module whose attribute ``command`` is its click command; imported only when the verb is used."""


class Verbs(click.Group):
    """A group that imports a verb's module on use, and prints typed errors as a line each."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Returns all verbs, without importing them."""
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """Imports the verb's module and returns its command."""
        module = VERBS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = importlib.import_module(module).command
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Runs the verb. Exits with status 2 for a wrong configuration, 1 for other failures."""
        try:
            return super().invoke(ctx)
        except KVDepotError as error:
            for line in str(error).splitlines() or [type(error).__name__]:
                click.echo(f"error: {line}", err=True)
            sys.exit(2 if isinstance(error, ConfigError) else 1)


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvdepot")
def main() -> None:
    """Keeps the KV caches of LLM engines.

    Exit status: 0 = done, 1 = failed, 2 = wrong usage or configuration.
    """
