"""docs/layouts.md contains the results of these tests; ``--write-layouts`` writes it."""

from pathlib import Path

import checks
import pytest
from cases import CASES, Case

PAGE = Path(__file__).resolve().parents[2] / "docs" / "layouts.md"
BEGIN, END = "<!-- written by make test-layouts -->\n", "<!-- end -->\n"


def table() -> list[str]:
    """Returns the lines of the page's table, without its head."""
    text = PAGE.read_text("utf-8")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[begin:end].splitlines()[len(checks.HEAD) :]


@pytest.fixture(scope="module", autouse=True)
def written(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-layouts"):
        text = PAGE.read_text("utf-8")
        begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        lines = "\n".join([*checks.HEAD, *(str(checks.row(case)) for case in CASES)])
        PAGE.write_text(f"{text[:begin]}{lines}\n{text[end:]}", "utf-8")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_page_says_what_is_so(case: Case) -> None:
    assert str(checks.row(case)) in table(), "make test-layouts ARGS=--write-layouts writes the table"


def test_the_page_says_nothing_else() -> None:
    assert len(table()) == len(CASES) == len(set(CASES))
