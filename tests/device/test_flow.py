"""P3 through the complete client: an engine's streams, events and kernels, on a driver that works with delays.

The driver is the stand-in that ``make test-device`` builds; with ``KVDEPOT_TEST_GPU=1`` it is the machine's own.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STANDIN = ROOT / ".work" / "standin" / "cuda" / "libcuda.so.1"
REAL = os.environ.get("KVDEPOT_TEST_GPU") == "1"
SCHEDULES = 1 if REAL else 25
RUN_S = 300
ENGINES = ("memcpy", "batch", "kernel", "auto")

pytestmark = pytest.mark.timeout(4 * RUN_S)  # each program has a limit of its own


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides the driver under the name that processes look for."""
    if REAL:
        return Path("libcuda.so.1")
    if not STANDIN.is_file():
        pytest.fail(f"{STANDIN} is missing: run make test-device, which builds it")
    place = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    shutil.copy(STANDIN, place)
    return place


def run(library: Path, *command: str, cache: Path | None = None) -> str:
    """Returns the standard output of a Python program that finds this driver; ``cache`` keeps what it measures."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(cache or library.parent)}
    if not REAL:
        environ["LD_LIBRARY_PATH"] = str(library.parent)
    done = subprocess.run(
        [sys.executable, *command], env=environ, capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return done.stdout


def empty_cache(library: Path) -> Path:
    """Returns a place of its own, so that a program measures each device itself."""
    return Path(tempfile.mkdtemp(dir=library.parent))


def flow(library: Path, *options: str, seed: int = 0) -> dict[str, Any]:
    """Returns failures by seed."""
    program = str(Path(__file__).with_name("flow.py"))
    schedules = ["--seed", str(seed), "--schedules", str(SCHEDULES)]
    told = run(library, program, str(library), *options, *schedules, cache=empty_cache(library))
    wrong: dict[str, Any] = json.loads(told.splitlines()[-1])
    return wrong


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_computed_is_what_later_kernels_read(library: Path, engine: str, layerwise: bool) -> None:
    assert flow(library, "--engine", engine, *["--layerwise"] * layerwise) == {}


@pytest.mark.skipif(REAL, reason="a real device may be quick enough to hide a missing wait")
@pytest.mark.parametrize("wait", ["save", "load", "layer"])
@pytest.mark.parametrize("layerwise", [True, False])
def test_a_wait_that_is_left_out_shows(library: Path, wait: str, layerwise: bool) -> None:
    """Otherwise the test above would prove nothing."""
    assert flow(library, "--without", wait, *["--layerwise"] * layerwise) != {}


def hang(library: Path, direction: str, engine: str, layerwise: bool) -> dict[str, Any]:
    """Returns the observations of a hanging device."""
    program = str(Path(__file__).with_name("hang.py"))
    options = [direction, "--engine", engine, *["--layerwise"] * layerwise]
    told = run(library, program, str(library), *options, cache=empty_cache(library))
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


@pytest.mark.skipif(REAL, reason="a real device is not made to hang")
@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_dump_that_hangs_fails_in_time(library: Path, engine: str, layerwise: bool) -> None:
    """P2: waiters are notified, the other direction goes on, and closing returns."""
    found = hang(library, "dump", engine, layerwise)
    assert found["beside"] == [True, {}]
    assert found["hung"] == [True, {"timeout": 4}]
    assert found["behind"] == [True, {"unavailable": 1}]
    assert found["half there"] == 0
    assert found["counted"] == {"timeout": 1, "unavailable": 1}
    assert found["closed"] == [False, True], "the pages may be unmapped when the device has finished"
    assert found["violations"] == ""


@pytest.mark.skipif(REAL, reason="a real device is not made to hang")
@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_load_that_hangs_ends_when_nothing_is_written_any_more(library: Path, engine: str, layerwise: bool) -> None:
    """P1: its pages are not free before; P2: later loads are misses, and closing returns."""
    found = hang(library, "load", engine, layerwise)
    assert found["beside"] == [True, {}]
    assert found["behind"] == {"unavailable": 4}
    assert found["first ended"] is False, "the device may still write into its pages"
    # One that was refused writes nothing, nor does one whose limit passed before its thread reached the device.
    said = found["said before the device was through"]
    assert [failures for failures in said if failures not in ({"unavailable": 4}, {"timeout": 4})] == []
    # A load whose thread gets no processor between its deadline and the device's end finds its blocks copied.
    assert found["hung"]
    assert all(failures in ({"timeout": 4}, {}) for failures in found["hung"])
    assert found["violations"] == ""


def tensors(library: Path, what: str, *options: str) -> dict[str, Any]:
    """Returns failures by seed of a program that uses tensors or addresses."""
    program = str(Path(__file__).with_name("tensors.py"))
    told = run(library, program, str(library), what, *options, cache=empty_cache(library))
    wrong: dict[str, Any] = json.loads(told.splitlines()[-1])
    return wrong


@pytest.mark.parametrize("ordered", ["tensors", "event"])
def test_tasks_over_tensors_begin_behind_what_was_launched(library: Path, ordered: str) -> None:
    """Tensors are ordered by the store, addresses by their event."""
    assert tensors(library, ordered, "--schedules", str(SCHEDULES)) == {}


@pytest.mark.skipif(REAL, reason="a real device may be quick enough to hide a missing wait")
def test_tasks_over_addresses_without_an_event_do_not_wait(library: Path) -> None:
    """Otherwise the test above would prove nothing."""
    assert tensors(library, "nothing", "--schedules", str(SCHEDULES)) != {}


@pytest.mark.skipif(REAL, reason="a real driver places allocations where it likes")
@pytest.mark.parametrize("what", ["block", "blocks"])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_lies_in_allocations_that_touch_is_stored_and_loaded(library: Path, engine: str, what: str) -> None:
    assert tensors(library, what, "--engine", engine) == {}


@pytest.mark.skipif(REAL, reason="tables of a real device depend on it")
def test_doctor_shows_what_was_measured_and_what_auto_makes_of_it(library: Path) -> None:
    kvdepot = ("-m", "kvdepot", "doctor")
    before = run(library, *kvdepot)
    assert "device 3: not measured yet: run kvdepot bench copy --device 3, or start an engine with it" in before
    assert before.count("not tested yet") > 3
    cache = library.parent / "kvdepot-devices"
    measure = (
        "import json; from kvdepot._native import Depot\n"
        "depot = Depot.embedded(json.dumps({'pool_bytes': 1 << 20, 'pipeline': 'Cache'}))\n"
        "namespace = depot.open_namespace('{\"a\": 1}', '[[1, [4096]]]')\n"
        f"copy = {{'cuda_device': 3, 'copy_engine': 'auto', 'cache_dir': {str(cache)!r}}}\n"
        "store = depot.store(namespace, copy_json=json.dumps(copy)); store.close(); depot.close()\n"
    )
    run(library, "-c", measure)
    after = run(library, *kvdepot)
    lines = after[after.index("\ndevice 3: measured 20") :].splitlines()[1:]
    assert "GB/s, submission included" in lines[0]
    assert lines[1].split()[:7] == ["direction", "copies", "KiB", "each", "memcpy", "batch", "kernel"]
    assert lines[1].rstrip().endswith("while decoding")
    one = json.loads(run(library, *kvdepot, "--json"))["devices"][3]
    assert len(one["choices"]) >= 1
    for line, choice in zip(lines[2 : 2 + len(one["choices"])], one["choices"], strict=True):
        cells = line.split()
        assert cells[0] == ("load" if choice["to_device"] else "dump")
        assert [int(cells[1]), float(cells[2]) * 1024] == [choice["ops"], choice["op_bytes"]]
        assert cells[-3:] == [choice["auto"], choice["auto_large"], choice["auto_decoding"]]
    assert "device 4: not measured yet" in after


@pytest.mark.skipif(REAL, reason="what is found on a real device depends on it")
def test_doctor_says_which_engines_are_found_allowed_and_trusted(library: Path) -> None:
    file = library.parent / "forbids.yaml"
    file.write_text("copy_engines_forbidden: [kernel]\n")
    copy = {"cuda_device": 5, "copy_engine": "auto", "cache_dir": str(library.parent / "kvdepot-devices")}
    attach = (
        "import ctypes, json, sys; from kvdepot._native import Depot\n"
        f"driver = ctypes.CDLL({str(library)!r}); driver.standin_reset(5, ctypes.c_uint64(1))\n"
        "driver.standin_corrupt(5, b'cuMemcpyBatchAsync')\n"
        "depot = Depot.embedded(json.dumps({'pool_bytes': 1 << 20, 'pipeline': 'Cache'}))\n"
        "namespace = depot.open_namespace('{\"a\": 1}', '[[1, [4096]]]')\n"
        f"store = depot.store(namespace, copy_json={json.dumps(copy)!r}); store.close(); depot.close()\n"
    )
    run(library, "-c", attach)
    report = json.loads(run(library, "-m", "kvdepot", "doctor", "--config", str(file), "--json"))
    ways = {way["engine"]: way for way in report["devices"][5]["ways"]}
    assert [ways[name]["found"] for name in ("memcpy", "batch", "kernel")] == ["yes"] * 3
    assert ways["memcpy"] == {"engine": "memcpy", "found": "yes", "allowed": "yes", "trusted": "yes"}
    assert ways["batch"]["trusted"] == "no: wrong bytes came to the device when it was tested"
    assert ways["kernel"]["allowed"] == "no: copy_engines_forbidden"
    assert ways["gdr"]["allowed"] == "no: use_gdr is false"
    assert "no: wrong bytes came to the device" in run(library, "-m", "kvdepot", "doctor")


def test_without_a_driver_the_store_says_so(tmp_path: Path) -> None:
    if REAL:
        pytest.skip("there is a driver")
    code = (
        "import json; from kvdepot._native import Depot, KVDepotError\n"
        "depot = Depot.embedded(json.dumps({'pool_bytes': 1 << 20, 'pipeline': 'Cache'}))\n"
        "namespace = depot.open_namespace('{\"a\": 1}', '[[1, [4096]]]')\n"
        "try: depot.store(namespace, copy_json='{\"cuda_device\": 0}')\n"
        "except KVDepotError as error: print(error.kind, error)\n"
    )
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("unavailable ")
    assert "CUDA driver not found" in done.stdout
