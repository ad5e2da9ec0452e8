"""An engine's process has the core's log lines, worded for its pipeline."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot import _native, logs
from kvdepot.config import KVDepotConfig
from kvdepot.engines.attachment import attach


@pytest.mark.parametrize(("pipeline", "passes_through"), [("Cache|Posix", False), ("Posix", True)])
def test_attaching_sets_up_the_core_s_log(monkeypatch: pytest.MonkeyPatch, pipeline: str, passes_through: bool) -> None:
    set_up: list[tuple[Any, ...]] = []
    connected: list[dict[str, Any]] = []
    monkeypatch.setenv("UC_LOGGER_LEVEL", "debug")
    monkeypatch.setattr(logs, "_done", [])
    monkeypatch.setattr(_native, "init_logging", lambda *given, **named: set_up.append((*given, named["max_files"])))
    monkeypatch.setattr(_native, "Depot", SimpleNamespace(connect=lambda *_, **named: connected.append(named)))
    attach(KVDepotConfig(pipeline=pipeline, directories=["/mnt/test"]), "engine", 4096)
    assert set_up == [("debug", None, 10)]
    assert [named["passes_through"] for named in connected] == [passes_through]
