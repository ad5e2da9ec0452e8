"""Help pages of the command line."""

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from kvdepot.cli import main


def pages(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from pages(inner, (*words, name))


@pytest.mark.parametrize("words", list(pages(main)), ids=" ".join)
def test_examples_of_a_help_page_keep_their_lines(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(main, [*words, "--help"], prog_name="kvdepot", terminal_width=100)
    assert shown.exit_code == 0
    assert "\\b" not in shown.output
    examples = [line for line in shown.output.splitlines() if line.startswith("  kvdepot ")]
    assert all(line.count("kvdepot ") == 1 for line in examples)
