"""docs/ucm.md: every item of UCM's documents has a state, and every test that is named exists."""

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from node import NodeDepot

from kvdepot.compat import SHIMS
from kvdepot.config.environment import FILES_VARIABLE, SIZE_VARIABLE
from kvdepot.config.seeds import STORES, TOP_LEVEL

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ucm.md").read_text("utf-8")
STATES = ("works", "differs", "stand-in", "not shown", "no")
NAMED = re.compile(r"`([\w/.]+\.(?:py|rs))::(\w+)`(?: \(([^)]*)\))?")


@dataclass(frozen=True)
class Item:
    """A row of the page's tables."""

    ucm: str
    state: str
    here: str
    tests: str

    @property
    def named(self) -> list[tuple[str, str, str]]:
        """File, function and remark of each test."""
        return NAMED.findall(self.tests)


def items() -> list[Item]:
    found = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] not in ("UCM", "---"):
            found.append(Item(*cells))
    return found


ITEMS = items()


@functools.cache
def functions(file: Path) -> dict[str, bool]:
    """Returns the tests of a file, and whether each runs with ``--full`` only."""
    text = file.read_text("utf-8")
    if file.suffix == ".rs":
        made = re.findall(r"#\[test\]\n((?:\s*(?:#\[.*\]|//.*)\n)*)\s*fn (\w+)\(", text)
        return {name: False for attributes, name in made if "#[ignore" not in attributes}
    whole = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {
        node.name: any(ast.unparse(decorator) == "pytest.mark.full" for decorator in node.decorator_list)
        for node in whole
        if node.name.startswith("test_")
    }


def file_of(name: str) -> Path:
    return ROOT / "tests" / name if name.endswith(".py") else ROOT / "crates" / f"kvdepot-{name}"


def test_every_row_is_an_item():
    tables = PAGE.partition("## Stores")[2]
    rows = re.findall(r"^\| (?!UCM |---)", tables, re.MULTILINE)
    assert len(ITEMS) == len(rows) > 40


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.ucm[:50])
def test_each_item_has_a_state_and_tests_that_exist(item):
    assert item.state in STATES
    assert bool(item.named) == (item.state not in ("not shown", "no")), "a test shows it, or it is not shown"
    assert NAMED.sub("", item.tests).strip(", ") == "", "something else than tests is in the last column"
    for name, function, remark in item.named:
        known = functions(file_of(name))
        assert function in known, f"{name} has no test {function}"
        assert not known[function] or "--full" in remark, f"{name}::{function} runs with --full only: say so"


def test_no_key_of_ucm_is_missing():
    said = " ".join(item.ucm for item in ITEMS)
    keys = {key for keys in STORES.values() for key in keys} | set(TOP_LEVEL)
    missing = {key for key in {*keys, *STORES, SIZE_VARIABLE, FILES_VARIABLE} if f"`{key}" not in said}
    assert missing == set()
    (module,) = (path for path in SHIMS["ucm"].files if path.endswith("ucm_connector.py"))
    assert module.removesuffix(".py").replace("/", ".") in said


def test_the_pool_takes_no_space_in_dev_shm(tmp_path):
    depot = NodeDepot(tmp_path)
    with depot.open([4096], {"model": "shm"}):
        maps = Path(f"/proc/{depot.pid}/maps").read_text()
    depot.kill()
    assert "/memfd:kvdepot-pool" in maps
    assert "/dev/shm" not in maps
