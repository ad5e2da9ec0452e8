"""Output of verbs: JSON for programs, tables for people."""

import json
import sys
from collections.abc import Iterable, Sequence

import click

COLUMNS_WITHOUT_TERMINAL = 200


def print_json(value: object) -> None:
    """Prints a value as indented JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a table that fits the terminal; cells are wrapped, never cut."""
    from rich.console import Console  # imported here, because only tables need it
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(printable(cell_text(cell))) for cell in row))
    Console(width=None if sys.stdout.isatty() else COLUMNS_WITHOUT_TERMINAL).print(table)


def printable(text: str) -> str:
    """Returns text that a terminal cannot obey: what is not printable, except a line's end, becomes U+FFFD."""
    return "".join(one if one == "\n" or one.isprintable() else "\ufffd" for one in text)


def cell_text(value: object) -> str:
    """Formats a value for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return ", ".join(map(cell_text, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
