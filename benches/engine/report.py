"""What the programs that measure engines have in common: their conditions, their report, and how they run."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.lab.machine import machine
from tools.lab.program import run_program
from tools.lab.progress import Progress

WIDTH = 120


def conditions_of(arguments: argparse.Namespace, load: Mapping[str, object], *names: str) -> dict[str, object]:
    """Returns what the figures depend on: the machine, its load, these options, and the settings of ``--set``."""
    options = {name: getattr(arguments, name) for name in names}
    return {"machine": machine(), "load_average": load, **options, "settings": dict(arguments.settings)}


def print_report(
    title: str,
    columns: Sequence[str],
    rows: Mapping[Any, Mapping[str, Any]],
    conditions: Mapping[str, object],
    cells: Callable[[Mapping[str, Any]], Sequence[str]],
    *,
    as_json: bool,
) -> None:
    """Prints figures by their row, as JSON or as a table with the conditions below it.

    Args:
        title: of the table.
        columns: headings; the first one is that of the rows' names, and empty for names that are no numbers.
        rows: figures of each row.
        conditions: what they depend on.
        cells: returns the texts of a row after its name.
        as_json: whether to print JSON.
    """
    if as_json:
        print(json.dumps({"conditions": conditions, "rows": rows}, indent=2))
        return
    table = Table(title=title, title_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, row in rows.items():
        table.add_row(str(name), *cells(row))
    Console(width=WIDTH).print(table)
    print("\n".join(f"{name}: {value}" for name, value in conditions.items()))


def run_measurement(
    parse: Callable[[], argparse.Namespace], measure: Callable[[argparse.Namespace, Progress], int]
) -> int:
    """Reads the command line and measures; returns the exit status."""
    arguments = parse()
    return run_program(lambda progress: measure(arguments, progress))
