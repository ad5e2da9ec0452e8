"""Help pages of the command line: each command has an example, and each example is a command line that it takes."""

import shlex
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


def page(words: tuple[str, ...]) -> list[str]:
    shown = CliRunner().invoke(main, [*words, "--help"], prog_name="kvdepot", terminal_width=100)
    assert shown.exit_code == 0
    return shown.output.splitlines()


def command_of(words: tuple[str, ...]) -> click.Command:
    command: click.Command = main
    for word in words:
        assert isinstance(command, click.Group)
        inner = command.get_command(click.Context(command), word)
        assert inner is not None
        command = inner
    return command


def parse(command: click.Command, given: list[str]) -> None:
    """Parses a command line as click does, through groups, and runs nothing."""
    if not isinstance(command, click.Group):
        command.make_context("kvdepot", given)
        return
    inner = command.get_command(click.Context(command), given[0])
    assert inner is not None, given
    parse(inner, given[1:])


@pytest.mark.parametrize("words", list(pages(main)), ids=" ".join)
def test_every_command_has_an_example_that_it_takes(words: tuple[str, ...]) -> None:
    """The options of examples are run by `make test-docs`, as all are."""
    examples = [line.strip() for line in page(words) if line.startswith("  kvdepot ")]
    assert examples, "add one to the docstring, behind a line with \\b"
    for example in examples:
        given = shlex.split(example)[1:]
        assert tuple(given[: len(words)]) == words
        try:
            parse(command_of(words), given[len(words) :])
        except click.BadParameter as error:
            # Files of an example may be missing here.
            if "does not exist" not in error.message:
                raise


@pytest.mark.parametrize("words", list(pages(main)), ids=" ".join)
def test_examples_of_a_help_page_keep_their_lines(words: tuple[str, ...]) -> None:
    shown = page(words)
    assert not any("\\b" in line for line in shown)
    examples = [line for line in shown if line.startswith("  kvdepot ")]
    assert all(line.count("kvdepot ") == 1 for line in examples)


def test_what_only_engines_pass_is_not_offered_to_people() -> None:
    text = "\n".join(page(("serve",)))
    assert "--block-bytes" in text
    assert "--core-json" not in text
