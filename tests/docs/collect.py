"""Commands that README, docs, `make help` and every `--help` tell people to run."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from kvdepot.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:[A-Z_]+=\S+\s+)?(?:kvdepot|make|ulimit|kubectl|docker)\s[^`]+)`")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
TARGET = re.compile(r"^([a-z0-9-]+):.*## ", re.MULTILINE)
# A fenced block without a language belongs to a shell if its first word is one of these.
SHELL_WORDS = {"make", "kvdepot", "vllm", "curl", "kubectl", "openssl", "head", "install", "ulimit", "docker"} | {
    ".venv-vllm/bin/python"
}


@dataclass(frozen=True)
class Snippet:
    """A fenced block."""

    page: str
    language: str
    text: str


def snippets(language: str) -> list[Snippet]:
    """Returns fenced blocks of this language, in order."""
    return [
        Snippet(page.name, found[1], found[2])
        for page in PAGES
        for found in FENCE.finditer(page.read_text("utf-8"))
        if found[1] == language
    ]


def shell_commands(text: str) -> Iterator[str]:
    """Returns a block's commands: a backslash or an open quote continues on the next line; text after # is left out."""
    command = ""
    for line in text.splitlines():
        command = f"{command} {line.strip()}" if command else line.strip()
        if command.endswith("\\"):
            command = command[:-1].rstrip()
            continue
        try:
            words = shlex.split(command, comments=True)
        except ValueError:
            continue  # a quote is open
        if words:
            yield without_comment(command)
        command = ""
    assert not command, f"a command without an end: {command}"


def without_comment(command: str) -> str:
    """Returns the command without the text after `` # ``, with single spaces."""
    return " ".join(re.sub(r"\s#\s.*$", "", command).split())


def documented_commands() -> set[str]:
    """Returns every command of a fenced block or in the text."""
    found = set()
    for page in PAGES:
        text = page.read_text("utf-8")
        for block in snippets(""):
            if block.page == page.name and (block.text.split() or [""])[0] in SHELL_WORDS:
                found.update(shell_commands(block.text))
        prose = FENCE.sub("", text)
        found.update(" ".join(one.split()) for one in INLINE.findall(prose))
    return found


def make_targets() -> list[str]:
    """Returns the targets that `make help` lists."""
    return TARGET.findall((ROOT / "Makefile").read_text("utf-8"))


def click_options(command: click.Command | None = None, path: tuple[str, ...] = ("kvdepot",)) -> set[str]:
    """Returns `kvdepot verb --option` for every verb and option."""
    command = main if command is None else command
    context = click.Context(command, info_name=path[-1])
    if isinstance(command, click.Group):
        verbs = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
        return {option for name, inner in verbs if inner is not None for option in click_options(inner, (*path, name))}
    options = [one for one in command.params if isinstance(one, click.Option)]
    return {f"{' '.join(path)} {max(one.opts, key=len)}" for one in options} | {" ".join(path)}


def click_parts(words: list[str]) -> set[str]:
    """Returns verb and options of a kvdepot command line, spelled as `click_options` spells them."""
    command: click.Command = main
    path = ["kvdepot"]
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        inner = command.get_command(click.Context(command), rest[0])
        if inner is None:
            break
        command, path, rest = inner, [*path, rest[0]], rest[1:]
    verb = " ".join(path)
    known = {name: max(one.opts, key=len) for one in command.params for name in one.opts if name.startswith("-")}
    return {verb} | {f"{verb} {known[word.split('=')[0]]}" for word in rest if word.split("=")[0] in known}


def program_options(python: Path, program: list[str]) -> set[str]:
    """Returns options of a program that supports `--help`."""
    shown = subprocess.run(
        [python, *program, "--help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=100
    ).stdout
    # The part before is the usage line, whose options are those that are listed, and a text.
    return set(OPTION.findall("\n".join(line for line in shown.splitlines() if line.startswith("  -")))) - {"--help"}
