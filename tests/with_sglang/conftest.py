"""Real SGLang on CPU over a depot that is started and killed."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.lab.depot import DepotHome
from tools.lab.rounds import ROOT
from tools.sglang.engine import STANDIN

pytest.register_assert_rewrite("killed")

# For tests that import SGLang themselves.
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
sys.path.insert(0, str(STANDIN))

MISSING = [name for name in ("sglang", "torch") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["standin/*", *(["test_*.py"] if MISSING else [])]
MODEL_S = 300
POOL_GB = 0.125


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every combination; without it a set that shows each once")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: a combination that runs with --full only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_report_header() -> list[str]:
    return [f"nothing is tested without {', '.join(MISSING)}: make test-sglang"] if MISSING else []


def settings(home: DepotHome, **values: Any) -> dict[str, Any]:
    """The backend's keys: a timeout is a miss, but here the machine is busy and hits are counted."""
    return {
        "pipeline": "Cache|Posix",
        "directories": [str(home.blocks)],
        "socket": str(home.socket),
        "pool_gb": POOL_GB,
        "start_depot": False,
        "attach_timeout_ms": 60_000,
        # SGLang ends itself when a thread of its does not end within 10 s.
        "call_timeout_ms": 8_000,
        **values,
    }


def model(architecture: str = "llama", seed: int = 0) -> str:
    """A tiny model with random weights; another seed has the same configuration."""
    directory = Path(os.environ.get("KVDEPOT_MODELS", "/tmp/kvdepot-models")) / f"sglang-{architecture}-{seed}"
    if not (directory / "config.json").exists():
        make = [sys.executable, str(ROOT / "tools" / "make_model.py"), str(directory), "--layers", "4"]
        more = ["--architecture", architecture, "--seed", str(seed)]
        subprocess.run([*make, *more], check=True, timeout=MODEL_S)
    return str(directory)


def cores_of_ranks(ranks: int) -> dict[str, str]:
    """Returns what SGLang asks for in its environment where there are more ranks than NUMA nodes; all get one core."""
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, [min(os.sched_getaffinity(0))] * ranks))}


def interpreter(variable: str, environment: str, target: str) -> str:
    """Returns the Python of another engine's environment.

    The test is skipped if there is none. It fails instead if the variable names one, as ``make test-full`` does.
    """
    named = os.environ.get(variable)
    python = named or str(ROOT / environment / "bin" / "python")
    if not Path(python).exists():
        if named:
            pytest.fail(f"{variable}: {named} does not exist: make {target}")
        pytest.skip(f"no {environment}: make {target}, or {variable} names an interpreter that has the engine")
    return python


@pytest.fixture
def home(tmp_path: Path) -> Iterator[DepotHome]:
    with DepotHome(tmp_path / "depot", {"pool_gb": POOL_GB}) as made:
        yield made
