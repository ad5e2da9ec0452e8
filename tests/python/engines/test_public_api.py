"""All faces stand on the Python API that kvdepot documents for everyone: none reaches for the core itself."""

import ast
import importlib
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


PUBLIC_MODULES = {"kvdepot", "kvdepot.config", "kvdepot.errors"}
"""Modules whose ``__all__`` is documented."""
MORE = {
    "kvdepot.config.engine_options": {"FILE_KEY", "name_of"},
    "kvdepot.config.environment": {"trace_limits"},
    "kvdepot.config.machine": {"Machine"},
    "kvdepot.config.metrics_file": {"MetricsFile", "Series", "read_metrics_file"},
    "kvdepot.config.sizes": {"GIB"},
    "kvdepot.config.tier_table": {"TIERS"},
    "kvdepot.absence": {"absence"},
    "kvdepot.priority": {"PRIORITIES", "Priority"},
    "kvdepot.publish.terms": {"EVENT_HASH_BYTES", "block_numbers", "event_fields"},
    "kvdepot.traces": {"live"},
    "kvdepot.traces.advice": {"GIB", "Measured", "Size", "advise"},
    "kvdepot.traces.files": {"recorded_name"},
}
"""What kvdepot's own faces share with its commands besides: docs/design.md says why nobody else needs it."""


def homes() -> dict[str, set[str]]:
    """Returns the public names by the modules that faces may import them from."""
    public = {name: set(importlib.import_module(name).__all__) for name in PUBLIC_MODULES}
    for name in kvdepot.__all__:
        public.setdefault(kvdepot._HOMES.get(name, "kvdepot.errors"), set()).add(name)
    return public


def imported(source: str) -> set[tuple[str, str]]:
    """Returns modules of kvdepot besides the faces, each with a name that is imported from it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names if alias.name != "kvdepot"}
    names = ((module, name) for module, name in found if module.split(".")[0] == "kvdepot")
    return {(module, name) for module, name in names if not module.startswith("kvdepot.engines")}


def test_faces_import_what_is_documented_or_listed_here() -> None:
    public, listed = homes(), set()
    for file in sorted(FACES.rglob("*.py")):
        for module, name in imported(file.read_text(encoding="utf-8")):
            if name not in public.get(module, set()):
                assert name in MORE.get(module, set()), f"{file}: {module}.{name} is neither public nor listed"
                listed.add((module, name))
    assert listed == {(module, name) for module, names in MORE.items() for name in names}, "the list has more"


def test_what_a_face_needs_is_on_the_page_of_the_python_api() -> None:
    page = (Path(__file__).parents[3] / "docs" / "library.md").read_text()
    assert [name for name in ("load_engine_config", "tell_if_absent", "is_failure") if f"`{name}`" not in page] == []


def test_a_hidden_import_is_seen() -> None:
    source = (
        "def late():\n    from kvdepot.traces import live\n    import kvdepot.hashes\nfrom kvdepot.engines import x"
    )
    assert imported(source) == {("kvdepot.traces", "live"), ("kvdepot.hashes", "")}
