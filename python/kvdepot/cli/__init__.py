"""The command ``kvdepot``. A verb is a file of this package and a line in ``VERBS``."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

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


INTERRUPTED = 130


class Verbs(click.Group):
    """A group that imports a verb's module on use, and prints errors in one style, a line each."""

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
            fail(str(error) or type(error).__name__, 2 if isinstance(error, ConfigError) else 1)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs the command line and exits. Click's own errors look like ours; Ctrl-C ends it with status 130."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            # An option that ends the program, such as --help, returns its status.
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
                sys.exit(error.exit_code)
            fail(usage_text(error), error.exit_code)
        except click.ClickException as error:
            fail(error.format_message(), error.exit_code)
        except click.Abort as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                sys.exit(INTERRUPTED)
            fail("cancelled", 1)
        sys.exit(status if isinstance(status, int) else 0)


def fail(text: str, status: int) -> NoReturn:
    """Prints an error, each of its lines marked as one, and exits."""
    for line in text.splitlines():
        click.echo(f"error: {line}", err=True)
    sys.exit(status)


def usage_text(error: click.UsageError) -> str:
    """Returns what is wrong with a command line, and which help page says what is right."""
    text = error.format_message().rstrip(".")
    text = text[:1].lower() + text[1:]
    return text if error.ctx is None else f"{text}; `{error.ctx.command_path} --help` shows the usage"


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvdepot")
def main() -> None:
    """Stores the KV caches of LLM engines outside the engines.

    Exit status: 0 = done, 1 = failed, 2 = wrong usage or configuration, 130 = interrupted.

    \b
    kvdepot doctor --config /etc/kvdepot.yaml
    kvdepot serve --config /etc/kvdepot.yaml
    kvdepot top
    """
