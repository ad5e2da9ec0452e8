"""Every release of vLLM that is supported, by tables of what the connector uses; none of them is installed.

``make vllm-surface`` writes the tables from vLLM's sources. A new use of a name of vLLM needs new tables.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_parts import BLOCK, FakeDepot, Step, found, geometry, options, request

from kvdepot.engines.vllm.early import WrongConfigurationError, check_release
from kvdepot.engines.vllm.releases import refusal
from kvdepot.engines.vllm.releases.block_tables import BlockTables
from kvdepot.engines.vllm.releases.sleep import HOOK
from kvdepot.engines.vllm.scheduler import SchedulerSide
from tools.vllm_surface.stubs import write_stubs
from tools.vllm_surface.used import ENGINES, ROOT, imported, used_by_connector

TABLES = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "vllm_surface").glob("*.json")}
RELEASES = sorted(TABLES, key=lambda name: [int(part) for part in name.split(".")])
OLDEST, NEWEST = RELEASES[0], RELEASES[-1]
CONNECTOR = ENGINES / "vllm" / "connector.py"
BASES = ("KVConnectorBase_V1", "SupportsHMA")
TOO_LONG_S = 900

NOT_VLLMS = {
    # torch, and packages that vLLM packs weights with
    *("partitions", "cpu_linear", "weight", "named_parameters"),
    # the model's configuration of transformers
    *("layer_types", "mamba_ssm_cache_dtype", "mamba_ssm_dtype"),
    # enums and classes of Python
    *("value", "name", "__dataclass_fields__"),
    # our own
    *("namespace_groups", "get_block_ids"),
}
"""Names that probes look for in objects that are not vLLM's."""

COME_LATER = {
    *((release, "vllm.v1.worker.gpu_worker:Worker.discard") for release in ("0.29", "0.30")),
    *((release, "vllm.v1.worker.gpu_worker:Worker.reset_weights") for release in ("0.29", "0.30", "0.31")),
}
"""Names without which the connector works in a release."""

CONFIG = """
[mypy]
mypy_path = {stubs}:{python}
explicit_package_bases = True
python_version = 3.10
check_untyped_defs = True
show_error_codes = True
[mypy-torch.*,opentelemetry.*,safetensors.*,transformers.*,huggingface_hub.*]
ignore_missing_imports = True
"""


def members(release: str, name: str) -> set[str]:
    """Returns the members of a class that the table names, those of its bases included."""
    definitions = TABLES[release]["definitions"]
    found = definitions.get(name)
    if found is None:
        return set()
    return set(found["members"]).union(*(members(release, base) for base in found["bases"]))


def hooks(release: str) -> set[str]:
    """Returns the methods that vLLM may call on the connector."""
    module = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    return set().union(*(members(release, f"{module}.{base}") for base in BASES))


def methods() -> list[ast.FunctionDef]:
    """Returns the connector's methods."""
    (connector,) = (node for node in ast.parse(CONNECTOR.read_text()).body if isinstance(node, ast.ClassDef))
    return [node for node in connector.body if isinstance(node, ast.FunctionDef)]


def never_called(release: str) -> list[range]:
    """Returns the lines of the hooks that vLLM calls in later releases only."""
    later = hooks(NEWEST) - hooks(release)
    return [range(one.lineno, (one.end_lineno or one.lineno) + 1) for one in methods() if one.name in later]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The type checker's cache: of the standard library, for example, which is the same for every release."""
    return tmp_path_factory.mktemp("types")


FACE = (ENGINES / "vllm", ENGINES / "vllm_plugin.py")


def mistakes(release: str, folder: Path, cache: Path, places: tuple[Path, ...] = FACE) -> list[str]:
    """Returns what a type checker finds wrong in the connector, or another face, as it would run in a release."""
    pytest.importorskip("mypy")
    write_stubs(TABLES[release], folder)
    config = folder / "mypy.ini"
    config.write_text(CONFIG.format(stubs=folder, python=ROOT / "python"))
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(cache)]
    command += ["--no-error-summary", "--hide-error-context", *map(str, places)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert run.returncode in (0, 1), run.stdout + run.stderr
    found = []
    for line in run.stdout.splitlines():
        place = re.match(r"(.+?):(\d+): error: ", line)
        dead = (
            place and Path(place[1]).resolve() == CONNECTOR and any(int(place[2]) in r for r in never_called(release))
        )
        if place and not dead:
            found.append(line)
    return found


@pytest.mark.timeout(TOO_LONG_S)
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_has_every_name_that_the_connector_uses(release: str, tmp_path: Path, cache: Path) -> None:
    """Modules, functions with their parameters, attributes of vLLM's objects, and the hooks' signatures."""
    assert mistakes(release, tmp_path, cache) == []


TIER = (ENGINES / "offloading",)
TIER_LACKS = {
    **dict.fromkeys(("0.29", "0.30"), ("cache_hit_source", 'no attribute "block_size_bytes"', "transfer_bytes")),
    "0.31": ("cache_hit_source",),
}
"""What the tier needs, and releases before 0.32 do not have."""


@pytest.mark.timeout(TOO_LONG_S)
@pytest.mark.parametrize("release", RELEASES)
def test_the_tier_of_vllms_offloading_fits_every_release_from_0_32_on(
    release: str, tmp_path: Path, cache: Path
) -> None:
    found = "\n".join(mistakes(release, tmp_path, cache, TIER))
    assert bool(found) == (release in TIER_LACKS), found
    for lack in TIER_LACKS.get(release, ()):
        assert lack in found


@pytest.mark.timeout(TOO_LONG_S)
def test_a_method_of_a_tier_that_vllm_has_changed_is_found(tmp_path: Path, cache: Path) -> None:
    table = json.loads(json.dumps(TABLES[NEWEST]))
    base = table["definitions"]["vllm.v1.kv_offload.tiering.base.SecondaryTierManager"]
    base["members"]["submit_load"] = "def (self, job_metadata: typing.Any, more: int) -> None"
    TABLES["less"] = table
    try:
        found = "\n".join(mistakes("less", tmp_path, cache, TIER))
    finally:
        del TABLES["less"]
    assert '"submit_load" incompatible' in found


@pytest.mark.timeout(TOO_LONG_S)
def test_a_name_that_a_release_lacks_is_found(tmp_path: Path, cache: Path) -> None:
    """The check above can fail: names of three kinds are taken away from the newest release."""
    table = json.loads(json.dumps(TABLES[NEWEST]))
    del table["names"]["vllm.v1.core.kv_cache_utils"]["resolve_kv_cache_block_sizes"]
    del table["definitions"]["vllm.config.parallel.ParallelConfig"]["members"]["tensor_parallel_size"]
    base = table["definitions"]["vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1"]
    base["members"]["request_finished"] = (
        "def (self, request: typing.Any, block_ids: list[int], more: int) -> typing.Any"
    )
    TABLES["less"] = table
    try:
        found = "\n".join(mistakes("less", tmp_path, cache))
    finally:
        del TABLES["less"]
    assert 'no attribute "resolve_kv_cache_block_sizes"' in found
    assert '"ParallelConfig" has no attribute "tensor_parallel_size"' in found
    assert '"request_finished" incompatible' in found


def test_the_newest_release_calls_every_hook() -> None:
    """A hook that vLLM has renamed would never be called, without a word."""
    inner = {"shutdown"}
    ours = {one.name for one in methods() if not one.name.startswith("_")}
    assert ours - inner <= hooks(NEWEST)


def test_every_probe_looks_for_a_name_that_some_release_has() -> None:
    """A ``getattr`` with a default hides a name that vLLM has renamed."""
    known = {name for table in TABLES.values() for one in table["definitions"].values() for name in own_members(one)}
    known |= {name for table in TABLES.values() for names in table["names"].values() for name in names}
    unknown = {name: places for name, places in used_by_connector().probes.items() if name not in known | NOT_VLLMS}
    assert unknown == {}


def own_members(definition: Any) -> set[str]:
    return set(definition["members"]) if isinstance(definition, dict) else set()


@pytest.mark.parametrize("release", RELEASES)
def test_names_that_no_type_shows_are_there(release: str) -> None:
    """The worker, its runner, and the argument of the factory, which are found through stack frames."""
    missing = []
    for name in refusal.BY_HAND:
        module, _, path = name.partition(":")
        owner, _, member = path.partition(".")
        origin = TABLES[release]["names"].get(module, {}).get(owner, "")
        if member not in members(release, origin) and (release, name) not in COME_LATER:
            missing.append(name)
    assert missing == []
    factory = TABLES[release]["names"]["vllm.distributed.kv_transfer.kv_connector.factory"]["KVConnectorFactory"]
    asked = TABLES[release]["definitions"][factory]["members"]["get_connector_class"]
    assert "kv_transfer_config" in asked


@pytest.mark.parametrize("release", RELEASES)
def test_a_supported_release_is_not_refused(release: str) -> None:
    for name in refusal.REQUIRED:
        module, _, path = name.partition(":")
        owner, _, member = path.partition(".")
        origin = TABLES[release]["names"][module][owner]
        assert not member or member in members(release, origin), name


def test_what_is_imported_at_the_start_is_required() -> None:
    """A release without it would end in an ``ImportError``, where a sentence is due."""
    names = set()
    for path in (*(ENGINES / "vllm").rglob("*.py"), ENGINES / "vllm_plugin.py"):
        module = ast.parse(path.read_text())
        runs = ast.Module([node for node in module.body if isinstance(node, (ast.Import, ast.ImportFrom))], [])
        names |= {f"{source}:{name}" for source, name in imported(runs)}
    listed = {re.sub(r"(:\w+)\..*", r"\1", name) for name in refusal.REQUIRED}
    assert names <= listed
    assert names, "nothing was collected"


def test_an_unsupported_release_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal, "REQUIRED", (*refusal.REQUIRED, "vllm.v1.core.sched.output:SchedulerOutput.tomorrow"))
    with pytest.raises(WrongConfigurationError) as caught:
        check_release()
    said = str(caught.value)
    assert re.fullmatch(
        r"kvdepot does not support vLLM \S+, which has no vllm\.v1\.core\.sched\.output\.SchedulerOutput\.tomorrow: "
        r"use vLLM 0\.29 or later, or a newer kvdepot",
        said,
    )


def test_a_module_that_is_not_there_is_a_reason_and_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal, "REQUIRED", ("vllm.no_such_module:Name",))
    assert "has no vllm.no_such_module.Name" in refusal.problem()


PAGES = ([1, 2], [3])


@pytest.mark.parametrize("release", RELEASES)
def test_block_tables_are_read_in_the_release_s_own_form(release: str) -> None:
    """The table says which form a release has; the other one's name is missing there."""
    has = members(release, "vllm.v1.core.sched.output.KVConnectorBlockState")
    resolves = "get_block_ids" in has
    assert (release == OLDEST) == (not resolves)

    def step(**tables: Any) -> Any:
        return SimpleNamespace(get_block_ids=tables.get) if resolves else SimpleNamespace(block_ids=tables)

    tables = BlockTables()
    assert tables.pages_of("a") is None
    tables.follow(step(a=PAGES), {"a", "b"})
    assert tables.pages_of("a") == PAGES
    assert tables.pages_of("b") is None


def test_tables_that_a_step_has_not_changed_are_remembered() -> None:
    """0.29 copies only the others; a request that has ended leaves nothing behind."""
    tables: Any = BlockTables()
    tables.follow(SimpleNamespace(block_ids={"a": PAGES, "b": PAGES}), {"a", "b"})
    tables.follow(SimpleNamespace(block_ids={"b": ([4], [5])}), {"a", "b"})
    assert (tables.pages_of("a"), tables.pages_of("b")) == (PAGES, ([4], [5]))
    tables.follow(SimpleNamespace(block_ids={}), {"b"})
    assert (tables.pages_of("a"), tables.pages_of("b")) == (None, ([4], [5]))


def test_a_table_that_changed_while_nothing_was_stored_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.29, after a reset: a running request was given a page in the steps that had no namespaces."""
    monkeypatch.setattr("kvdepot.engines.vllm.requests.block_keys", list)
    side = SchedulerSide(FakeDepot(), options(), geometry(0), 1)
    side.open_namespaces([found(0, 1)])
    side.new_request(request("r", 2 * BLOCK, known=5 * BLOCK))

    def planned(step: Step, **tables: Any) -> Any:
        output = step.output()
        output.kv_connector_block_state = SimpleNamespace(block_ids=tables, boundary_state_offloads={})
        return side.build_step(output)

    planned(Step().starts("r", 0, 2 * BLOCK, [1, 2]), r=([1, 2],))
    open_groups, side._namespaces.groups = side._namespaces.groups, []
    side._forget()
    planned(Step().goes_on("r", 2 * BLOCK, 1, None, ([3],)), r=([1, 2, 3],))
    side._namespaces.groups = open_groups
    saves = planned(Step().goes_on("r", 2 * BLOCK + 1, BLOCK - 1, None)).saves
    assert {group: blocks.pages for group, blocks in saves.items()} == {0: [1, 2, 3]}


def test_sleep_is_told_by_vllm_or_watched() -> None:
    """From 0.33 on there are hooks; both ways at once would end the copies twice."""
    told = [release for release in RELEASES if HOOK in hooks(release)]
    assert told == [release for release in RELEASES if int(release.split(".")[1]) >= 33]
