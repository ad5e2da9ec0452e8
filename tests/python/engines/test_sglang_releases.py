"""Every release of SGLang from 0.5.8, by tables of what the faces use; none of them is installed.

``make sglang-surface`` writes the tables from SGLang's sources. A new use of a name of SGLang needs new tables.
"""

import ast
import copy
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeGuard

import pytest

from kvdepot.engines.sglang import hits
from tools.sglang_surface.table import (
    FACES,
    HICACHE_NEEDS,
    HYBRID_NEEDS,
    LINKER_NEEDS,
    OPTIONAL,
    facts_tuple,
    used_by_faces,
)
from tools.vllm_surface.stubs import write_stubs
from tools.vllm_surface.used import ROOT

TABLES = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "sglang_surface").glob("*.json")}
RELEASES = sorted(TABLES, key=lambda name: [int(part) for part in name.split(".")])
OLDEST, NEWEST = RELEASES[0], RELEASES[-1]
FILES = {"hicache": "backend.py", "linker": "linker.py"}
CLASSES = {"hicache": "KVDepotHiCache", "linker": "KVDepotLinker"}
BASES = {
    "hicache": "sglang.srt.mem_cache.hicache_storage.HiCacheStorage",
    "linker": "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinker",
}
TOO_LONG_S = 900
CHECKED = (OLDEST, "0.5.10", "0.5.17", NEWEST)

NOT_SGLANGS = {
    # torch, transformers and Python
    *("value", "__name__"),
}
"""Names that probes look for in objects that are not SGLang's."""

OTHERS = {"describe_l3_object_layout"}
"""Methods that SGLang calls on a backend of its own only."""

RETURNS_NONE = 'Return type "bool" of "clear" incompatible with return type "None"'
"""The base class says so, but SGLang's own backends return a bool, too."""

GONE = {"torchao_config"}
"""Arguments that the newest release does not have any more."""

CONFIG = """
[mypy]
mypy_path = {stubs}:{python}
explicit_package_bases = True
python_version = 3.10
check_untyped_defs = True
show_error_codes = True
[mypy-torch.*,opentelemetry.*,safetensors.*,transformers.*,huggingface_hub.*,prometheus_client.*]
ignore_missing_imports = True
"""


def members(table: dict[str, Any], name: str) -> set[str]:
    """Returns the members of a class that a table names, those of its bases included."""
    found = table["definitions"].get(name)
    if not isinstance(found, dict):
        return set()
    return set(found["members"]).union(*(members(table, base) for base in found["bases"]))


def lacks(table: dict[str, Any], needs: tuple[str, ...]) -> list[str]:
    """Returns the names that a release does not have."""
    missing = []
    for name in needs:
        module, _, path = name.partition(":")
        owner, _, member = path.partition(".")
        origin = table["names"].get(module, {}).get(owner, "")
        if not origin or (member and member not in members(table, origin)):
            missing.append(path)
    return missing


def methods(face: str) -> dict[str, ast.FunctionDef]:
    """Returns the methods of a face's class; importing it takes an SGLang."""
    tree = ast.parse((FACES / FILES[face]).read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == CLASSES[face])
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def signature(method: ast.FunctionDef) -> inspect.Signature:
    """Returns what a method's callers see."""
    kinds = inspect.Parameter
    asked = method.args
    needed = len(asked.args) - len(asked.defaults)
    made = [
        kinds(one.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if index < needed else None)
        for index, one in enumerate(asked.args)
    ]
    for one, default in zip(asked.kwonlyargs, asked.kw_defaults, strict=True):
        made.append(kinds(one.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    return inspect.Signature(made[1:])  # without self


def refused_call(method: ast.FunctionDef, call: dict[str, Any]) -> str:
    try:
        signature(method).bind(*range(call["positional"]), **dict.fromkeys(call["keywords"]))
    except TypeError as error:
        return str(error)
    return ""


def refused_calls(table: dict[str, Any], face: str) -> list[str]:
    """Returns the calls of a release that a face does not accept; a method that the base class has is accepted."""
    ours, refused = methods(face), []
    for name, calls in table["calls"][face].items():
        if name not in ours:
            if name not in members(table, BASES[face]) | OTHERS:
                refused.append(f"{name}: there is no such method")
            continue
        refused += [f"{name}: {why}" for call in calls if (why := refused_call(ours[name], call))]
    if not table["calls"][face].get("__init__"):
        refused.append(f"nothing makes a {face} by the name of its class")
    return refused


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The type checker's cache: of the standard library, for example, which is the same for every release."""
    return tmp_path_factory.mktemp("types")


def mistakes(table: dict[str, Any], face: str, folder: Path, cache: Path) -> list[str]:
    """Returns what a type checker finds wrong in a face's class with the base class of a release."""
    pytest.importorskip("mypy")
    write_stubs(table, folder)
    config = folder / "mypy.ini"
    config.write_text(CONFIG.format(stubs=folder, python=ROOT / "python"))
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(cache)]
    command += ["--no-error-summary", "--hide-error-context", str(FACES / FILES[face])]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    ours = [line for line in run.stdout.splitlines() if re.search(rf"{FILES[face]}:\d+: error: ", line)]
    ours = [line for line in ours if RETURNS_NONE not in line]
    later = never_called(table, face)
    return [line for line in ours if not any(int(line.split(":")[1]) in lines for lines in later)]


def never_called(table: dict[str, Any], face: str) -> list[range]:
    """Returns the lines of the methods that SGLang calls in later releases only."""
    later = {name for name in TABLES[NEWEST]["calls"][face] if name not in table["calls"][face]}
    found = [one for name, one in methods(face).items() if name in later]
    if "batch_exists_v2" in later:
        found += [one for one in ast.parse((FACES / FILES[face]).read_text()).body if is_helper(one)]
    return [range(one.lineno, (one.end_lineno or one.lineno) + 1) for one in found]


def is_helper(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    """Whether a definition is the helper of ``batch_exists_v2``."""
    return isinstance(node, ast.FunctionDef) and node.name == "_result"


@pytest.mark.parametrize("release", RELEASES)
def test_hicache_fits_every_release(release: str) -> None:
    table = TABLES[release]
    assert lacks(table, HICACHE_NEEDS) == []
    assert refused_calls(table, "hicache") == []
    if "batch_exists_v2" in table["calls"]["hicache"]:
        assert lacks(table, HYBRID_NEEDS) == []


@pytest.mark.timeout(TOO_LONG_S)
@pytest.mark.parametrize("release", CHECKED)
def test_hicache_has_the_signatures_of_its_base_class(release: str, tmp_path: Path, cache: Path) -> None:
    """Each of the releases between them has the base class of one of these."""
    assert mistakes(TABLES[release], "hicache", tmp_path, cache) == []


def test_there_are_no_other_base_classes() -> None:
    checked = [TABLES[release]["definitions"][BASES["hicache"]] for release in CHECKED]
    others = [TABLES[release]["definitions"][BASES["hicache"]] for release in RELEASES]
    assert [others.index(one) for one in others if one not in checked] == []


@pytest.mark.timeout(TOO_LONG_S)
def test_the_linker_has_the_signatures_of_its_base_class(tmp_path: Path, cache: Path) -> None:
    assert mistakes(TABLES[NEWEST], "linker", tmp_path, cache) == []


def test_the_linker_fits_the_newest_release_only() -> None:
    fits = [
        release
        for release in RELEASES
        if not lacks(TABLES[release], LINKER_NEEDS) and not refused_calls(TABLES[release], "linker")
    ]
    assert fits == ["0.5.23"]
    linkers = [release for release in RELEASES if BASES["linker"] in TABLES[release]["definitions"]]
    assert linkers == ["0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"]


def test_what_the_documentation_says_of_releases() -> None:
    hybrid = [release for release in RELEASES if not lacks(TABLES[release], HYBRID_NEEDS)]
    assert hybrid == RELEASES[RELEASES.index("0.5.10") :]
    adapters = ("sglang.srt.mem_cache.utils:storage_namespace_seed",)
    known = [release for release in RELEASES if not lacks(TABLES[release], adapters)]
    assert known == ["0.5.20", "0.5.21", "0.5.22", "0.5.23"]
    metrics = tuple(name for name in OPTIONAL if "StorageMetrics" in name)
    assert [release for release in RELEASES if not lacks(TABLES[release], metrics)] == hybrid
    said = (ROOT / "docs" / "sglang.md").read_text()
    for sentence in (
        "0.5.17 and 0.5.23 run; 0.5.8 to 0.5.23 by their interfaces",
        "Before 0.5.20 SGLang's hashes leave out adapter and `cache_salt`",
        "Before 0.5.10 SGLang has no models with several pools in HiCache",
    ):
        assert sentence in said


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_says_how_it_was_started(release: str) -> None:
    """One of the two functions, or nothing distinguishes a model from others."""
    functions = ("sglang.srt.runtime_context:get_server_args", "sglang.srt.server_args:get_global_server_args")
    assert len(lacks(TABLES[release], functions)) < len(functions)


@pytest.mark.parametrize("release", RELEASES)
def test_values_that_the_faces_compare_with(release: str) -> None:
    """A pool or policy that SGLang has renamed would be taken for an unknown one."""
    ours = {
        "PoolName.KV": hits.KV,
        "PoolHitPolicy.ALL_PAGES": hits.ALL_PAGES,
        "PoolHitPolicy.TRAILING_PAGES": hits.TRAILING_PAGES,
    }
    values = TABLES[release]["values"]
    assert {name: values.get(name) for name in ours} == ours or not values
    assert bool(values) == (lacks(TABLES[release], HYBRID_NEEDS) == [])


def test_arguments_that_change_kv_are_those_of_the_newest_release() -> None:
    """An argument under another name would be missing from every namespace (P8)."""
    ours = {*facts_tuple("COMPUTE_ARGUMENTS"), *facts_tuple("EXPERT_ARGUMENTS")}
    assert ours - set(TABLES[NEWEST]["arguments"]) == GONE
    assert {name for table in TABLES.values() for name in table["arguments"]} == ours


def test_every_probe_looks_for_a_name_that_some_release_has() -> None:
    """A ``getattr`` with a default hides a name that SGLang has renamed."""
    known = {name for table in TABLES.values() for name in table["attributes"]} | NOT_SGLANGS
    looked_for = {*used_by_faces().probes, *facts_tuple("GEOMETRY")}
    assert looked_for - known == set()


@pytest.mark.timeout(TOO_LONG_S)
def test_a_name_that_a_release_lacks_is_found(tmp_path: Path, cache: Path) -> None:
    """The checks above can fail: a field, a parameter, a method and a base class are changed in the newest release."""
    table = copy.deepcopy(TABLES[NEWEST])
    base = table["definitions"][BASES["hicache"]]["members"]
    base["batch_exists"] = "def (self, keys: list[str], extra_info: typing.Any, more: int) -> int"
    del table["definitions"]["sglang.srt.mem_cache.hicache_storage.HiCacheStorageConfig"]["members"]["tp_rank"]
    table["calls"]["hicache"]["batch_get_v1"][0]["keywords"] = ["priority"]
    table["calls"]["hicache"]["forget"] = [{"positional": 1, "keywords": []}]
    assert lacks(table, HICACHE_NEEDS) == ["HiCacheStorageConfig.tp_rank"]
    assert refused_calls(table, "hicache") == [
        "batch_get_v1: got an unexpected keyword argument 'priority'",
        "forget: there is no such method",
    ]
    found = "\n".join(mistakes(table, "hicache", tmp_path, cache))
    assert '"batch_exists" incompatible' in found
