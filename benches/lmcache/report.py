"""Tables of the measurements with vLLM."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benches.engine.summary import milliseconds
from benches.lmcache.summary import QueriesRow, Row

WIDTH = 150


def print_first_token(rows: Sequence[Row], tokens: int) -> None:
    """Prints times to first token. Tokens found are the least and the most of all prompts."""
    columns = ("", "median ms", "min … max", "of own cache", "cold takes", "hit tokens", "L1 + L2", "output")
    table = new_table(f"Time to first token, {tokens} tokens", columns, names=2)
    before = ""
    for row in rows:
        cell = row.cell
        if before and before != row.title:
            table.add_section()
        hit = dict.fromkeys(str(count) for count in (min(cell.hit_tokens), max(cell.hit_tokens)))
        table.add_row(
            "" if before == row.title else row.title,
            row.step,
            milliseconds(cell.ttft_ms),
            f"{milliseconds(cell.fastest_ms)} … {milliseconds(cell.slowest_ms)}",
            "" if cell.of_own is None else f"{cell.of_own:.2f}×",
            f"{cell.faster:.2f}×",
            " … ".join(hit),
            " + ".join(str(count) for count in row.found.values()),
            "same" if cell.same_output else "[red]differs[/]",
        )
        before = row.title
    Console(width=WIDTH).print(table)


def print_queries(rows: Mapping[str, QueriesRow], title: str) -> None:
    """Prints the runs of the documents' workload."""
    columns = ("s", "of off", "mean TTFT ms", "of off", "median TTFT ms", "hit", "by L2", "failed")
    table = new_table(title, columns, names=1)
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row.seconds:.1f}",
            times(row.seconds_of_off),
            milliseconds(row.mean_ttft_ms),
            times(row.ttft_of_off),
            milliseconds(row.median_ttft_ms),
            f"{row.hit_part:.0%}",
            f"{row.l2_part:.0%}",
            str(row.failed),
        )
    Console(width=WIDTH).print(table)


def new_table(title: str, columns: Sequence[str], names: int) -> Table:
    """Returns an empty table, whose first columns are names without a heading."""
    table = Table(title=title, title_style="bold", title_justify="left")
    table.add_column("", no_wrap=True)
    for number, column in enumerate(columns, start=1):
        table.add_column(column, justify="left" if number < names else "right", no_wrap=True)
    return table


def times(ratio: float | None) -> str:
    """Returns a ratio as text; empty if there is none."""
    return "" if ratio is None else f"{ratio:.2f}×"
