"""Engines run in separate processes, forked from one that has imported vLLM; a test runs many phases in one."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_lab import PREVIOUS_PYTHON, Lab

from tools.lab.warm import Warm


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native", choices=["real", "fake"], default="real", help="the core, or its stand-in in Python")
    parser.addoption("--vllm-python", default=os.environ.get("KVDEPOT_VLLM_PYTHON", sys.executable))
    parser.addoption("--full", action="store_true", help="every combination; without it a set that shows each once")
    parser.addoption("--kills", type=int, default=3, help="how often to kill engine or depot (test_kills)")
    parser.addoption("--models", default=os.environ.get("KVDEPOT_MODELS", "/tmp/kvdepot-models"), help="tiny models")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: a combination that runs with --full only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def warm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """A process that has imported vLLM: engines are forked from it."""
    python = request.config.getoption("--vllm-python")
    probe = subprocess.run(
        [python, "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('vllm'))"], check=False
    )
    if probe.returncode != 0:
        pytest.skip("no vLLM in this interpreter (KVDEPOT_VLLM_PYTHON names another)")
    with Warm(tmp_path_factory.mktemp("warm") / "warm.log", python) as started:
        yield started


@pytest.fixture
def lab(tmp_path: Path, warm: Warm, request: pytest.FixtureRequest) -> Iterator[Lab]:
    option: Callable[[str], Any] = request.config.getoption
    made = Lab(tmp_path, option("--native"), option("--vllm-python"), Path(option("--models")), warm)
    yield made
    made.close()


@pytest.fixture
def real_lab(lab: Lab) -> Lab:
    """For tests that need the real core."""
    if lab.native != "real":
        pytest.skip("needs the real core")
    return lab


@pytest.fixture
def fake_lab(lab: Lab) -> Lab:
    """For failures that only the stand-in can inject."""
    return replace(lab, native="fake")


@pytest.fixture(scope="session")
def previous_warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """A process that has imported the release of vLLM before the newest one."""
    if not PREVIOUS_PYTHON.exists():
        pytest.skip("no environment of the previous release: make vllm-previous-env")
    with Warm(tmp_path_factory.mktemp("previous") / "warm.log", str(PREVIOUS_PYTHON)) as started:
        yield started


@pytest.fixture
def previous(tmp_path: Path, previous_warm: Warm, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Runs engines of that release."""
    made = Lab(tmp_path, "real", str(PREVIOUS_PYTHON), Path(request.config.getoption("--models")), previous_warm)
    yield made
    made.close()
