"""The dashboard's queries as Grafana sends them: with its variables replaced."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "kvdepot.json"
# What Grafana escapes in the value of a variable that may have several, for a regular expression in a PromQL string.
SPECIAL = re.compile(r"[\\^$.*+?()|{}\[\]]")


@dataclass(frozen=True)
class Query:
    """One line, or one set of lines, of a panel.

    Attributes:
        panel: title of the panel.
        expression: its PromQL, with Grafana's variables.
        legend: what names a line, with labels as in ``{{instance}}``.
        unit: Grafana's name of the panel's unit.
    """

    panel: str
    expression: str
    legend: str
    unit: str


def queries() -> list[Query]:
    """Returns the queries of all panels, in the board's order."""
    found = []
    for panel in json.loads(BOARD.read_text("utf-8"))["panels"]:
        unit = panel["fieldConfig"]["defaults"]["unit"]
        found += [Query(panel["title"], one["expr"], one["legendFormat"], unit) for one in panel["targets"]]
    return found


def variable(name: str) -> dict[str, Any]:
    """Returns the definition of a variable of the board."""
    board = json.loads(BOARD.read_text("utf-8"))
    (found,) = (one for one in board["templating"]["list"] if one["name"] == name)
    return dict(found)


def as_sent(expression: str, instances: Sequence[str] | None, rate_interval_s: float) -> str:
    """Returns an expression with its variables replaced.

    Args:
        expression: PromQL of the board.
        instances: what is chosen for the variable ``instance``; None is its "All".
        rate_interval_s: what ``$__rate_interval`` becomes.
    """
    if instances is None:
        chosen = variable("instance")["allValue"]
    else:
        escaped = [SPECIAL.sub(r"\\\\\g<0>", one) for one in instances]
        chosen = escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"
    return expression.replace("$instance", chosen).replace("$__rate_interval", f"{rate_interval_s:.0f}s")


def rate_interval_s(step_s: float, scrape_s: float) -> float:
    """Returns what Grafana takes for ``$__rate_interval``, with the scrape interval of its data source."""
    return max(step_s + scrape_s, 4 * scrape_s)


def legend(query: Query, labels: dict[str, str]) -> str:
    """Returns the name of a line. A label that the series lacks stays as it is written, so that it is noticed."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], found[0]), query.legend)
