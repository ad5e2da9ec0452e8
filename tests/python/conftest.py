"""Shared fixtures of the tests of the Python package."""

from pathlib import Path

import pytest

from kvdepot.cli import status_door
from kvdepot.config import KVDepotConfig, Machine
from kvdepot.config.variables import variable_of

GIB = 1 << 30
PATIENCE_S = 60
DATA = Path(__file__).resolve().parent.parent / "data"


@pytest.fixture
def machine() -> Machine:
    """A large machine whose defaults are known."""
    return Machine(
        memory_bytes=1024 * GIB,
        environ={"HOME": "/home/somebody"},
        free_disk_bytes=1000 * GIB,
        total_disk_bytes=2000 * GIB,
    )


@pytest.fixture
def small_machine() -> Machine:
    """A machine with less memory than the documented defaults need."""
    return Machine(
        memory_bytes=16 * GIB, environ={"HOME": "/home/somebody"}, free_disk_bytes=100 * GIB, total_disk_bytes=200 * GIB
    )


@pytest.fixture
def seeds() -> Path:
    """The YAML files of the project's original documents, verbatim."""
    return DATA / "seeds"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands wait for depots and disks longer than people would: here a busy machine may stop any process a while."""
    for name in ("running.WAIT_MS", "stat.WAIT_MS", "targets.WAIT_MS", "targets.CALL_MS"):
        monkeypatch.setattr(f"kvdepot.cli.{name}", 1000 * PATIENCE_S)
    for name in (
        "cli.stop.WAIT_S",
        "cli.doctor.NETWORK_S",
        "checks.directories.CLOCK_APART_S",
        "config.machine.DISK_ANSWER_S",
    ):
        monkeypatch.setattr(f"kvdepot.{name}", float(PATIENCE_S))
    for name in ("checks.directories.TRIAL_MS", "events.ANSWER_MS", "events.ATTACH_MS"):
        monkeypatch.setattr(f"kvdepot.{name}", 1000 * PATIENCE_S)
    for ask in (status_door.ask_page, status_door.read_page, status_door.read_status):
        monkeypatch.setattr(ask, "__defaults__", (float(PATIENCE_S),))


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in KVDepotConfig.key_table():
        monkeypatch.delenv(variable_of(key.name), raising=False)
    for variable in ("KVDEPOT_LOG", "UC_LOGGER_LEVEL", "UCM_LOG_MAX_SIZE", "UCM_LOG_MAX_FILES"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in the test's process list, and stop, no depots of other tests: those at configured sockets."""
    monkeypatch.setattr("kvdepot.cli.running.own_serving", lambda: iter(()))
