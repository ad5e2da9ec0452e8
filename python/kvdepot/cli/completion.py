"""``kvdepot completion``: the script that completes commands and options in a shell."""

import click
from click.shell_completion import get_completion_class

VARIABLE = "_KVDEPOT_COMPLETE"
SHELLS = ("bash", "fish", "zsh")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Prints the script that completes commands and options in a shell.

    \b
    bash: eval "$(kvdepot completion bash)" in ~/.bashrc (Bash 4.4 or later)
    zsh:  eval "$(kvdepot completion zsh)" in ~/.zshrc, after compinit
    fish: kvdepot completion fish > ~/.config/fish/completions/kvdepot.fish

    \b
    kvdepot completion bash
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"this version of click does not know the shell {shell}")
    click.echo(kind(ctx.find_root().command, {}, "kvdepot", VARIABLE).source())
