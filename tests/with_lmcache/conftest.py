"""LMCache's own classes over a depot that is started and killed."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tools.lab.depot import Depot, DepotHome

if TYPE_CHECKING:
    from chunks import Driver

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
MISSING = [name for name in ("lmcache", "torch") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> list[str]:
    return [f"nothing is tested without {', '.join(MISSING)}: make test-lmcache"] if MISSING else []


POOL_GB = 0.125


def settings(home: DepotHome, **values: Any) -> dict[str, Any]:
    """An adapter's configuration: a timeout is a miss, but here the machine is busy and hits are counted."""
    return {
        "pipeline": "Cache|Posix",
        "directories": [str(home.blocks)],
        "socket": str(home.socket),
        "pool_gb": POOL_GB,
        "start_depot": False,
        "attach_timeout_ms": 60_000,
        "call_timeout_ms": 30_000,
        **values,
    }


@pytest.fixture
def home(tmp_path: Path) -> Iterator[DepotHome]:
    with DepotHome(tmp_path / "depot", {"pool_gb": POOL_GB}) as made:
        yield made


@pytest.fixture
def depot(home: DepotHome) -> Iterator[Depot]:
    with home.start() as started:
        yield started


@pytest.fixture
def adapter(home: DepotHome, depot: Depot) -> Iterator[Any]:
    from kvdepot.engines.lmcache import KVDepotL2Adapter

    made = KVDepotL2Adapter(settings(home))
    yield made
    made.close()


@pytest.fixture
def driver(adapter: Any) -> "Driver":
    from chunks import Driver

    return Driver(adapter)
