"""All faces stand on the Python API that kvdepot documents for everyone: none reaches for the core itself."""

import ast
from pathlib import Path

import pytest

import kvdepot

FACES = Path(kvdepot.__file__).parent / "engines"
CORE = "kvdepot._native"
INTERNAL = {"native", "native_namespace", "_native"}
"""Attributes of the API's objects that hold those of the core."""


def uses_of_core(source: str) -> list[tuple[int, str]]:
    """Returns line and text of everything that reaches for the core, also in functions and under TYPE_CHECKING."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute) and node.attr in INTERNAL:
            names = [CORE]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [CORE] if CORE in node.value else []  # for importlib, and in comments that mislead
        else:
            continue
        if any(name == CORE or name.startswith(f"{CORE}.") for name in names):
            found.append((node.lineno, ast.unparse(node)))
    return found


@pytest.mark.parametrize(
    "source",
    [
        "from kvdepot import _native",
        "import kvdepot._native as core",
        "def late():\n    from kvdepot._native import Depot",
        "if TYPE_CHECKING:\n    from kvdepot._native import Depot",
        "def late():\n    importlib.import_module('kvdepot._native')",
        "store.native_namespace",
        "depot._native.claim",
    ],
)
def test_every_way_to_the_core_is_seen(source: str) -> None:
    assert uses_of_core(source)
    assert not uses_of_core("import kvdepot\nfrom kvdepot import Depot\nfrom kvdepot.errors import KVDepotError")


def test_no_face_needs_more_than_the_public_api() -> None:
    files = sorted(FACES.rglob("*.py"))
    assert {file.parent.name for file in files} >= {"vllm", "sglang", "lmcache", "offloading"}
    found = {str(file.relative_to(FACES)): uses_of_core(file.read_text(encoding="utf-8")) for file in files}
    assert {name: uses for name, uses in found.items() if uses} == {}
