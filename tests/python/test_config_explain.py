"""Every key's effective value has an origin; the generated page equals the table."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from kvdepot.config import KVDepotConfig, load_config
from kvdepot.config.machine import usable_memory_bytes
from kvdepot.config.reference import reference_markdown
from kvdepot.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent


def settings_of(config, machine):
    return {setting.key: (setting.value, setting.origin) for setting in config.effective(machine)}


def test_origins(seeds, small_machine):
    file = seeds / "000_pipeline.yaml"
    settings = settings_of(load_config(file, machine=small_machine), small_machine)
    assert list(settings) == [key.name for key in KVDepotConfig.key_table()]
    assert settings["pipeline"] == ("Cache|Posix", f"{file}:4")
    assert settings["directories"] == (("/mnt/test",), f"{file}:5")
    assert settings["use_gdr"] == (False, f"{file}:9")
    assert settings["pool_gb"] == (8.0, "machine")
    assert settings["posix_capacity_gb"] == (160.0, "machine")
    assert settings["posix_free_floor_percent"] == (2, "default")
    assert settings["timeout_ms"] == (30_000, "default")


def test_documented_default_is_no_fact_of_the_machine(machine):
    assert settings_of(load_config(machine=machine), machine)["pool_gb"] == (256.0, "default")


def test_dict_and_copies(machine):
    config = load_config({"timeout_ms": 5}, machine=machine).with_values(use_layerwise=False)
    settings = settings_of(config, machine)
    assert settings["timeout_ms"] == (5, "argument")
    assert settings["use_layerwise"] == (False, "argument")
    assert settings_of(config.with_values(timeout_ms=None), machine)["timeout_ms"] == (30_000, "default")


@pytest.mark.parametrize(
    ("environ", "level", "origin"),
    [
        ({}, "warn", "argument"),
        ({"UC_LOGGER_LEVEL": "DEBUG"}, "debug", "environment UC_LOGGER_LEVEL"),
        ({"UC_LOGGER_LEVEL": "debug", "KVDEPOT_LOG": "warning"}, "warn", "environment KVDEPOT_LOG"),
        ({"KVDEPOT_LOG": ""}, "warn", "argument"),
    ],
)
def test_environment_sets_the_log_level(environ, level, origin, machine):
    machine = dataclasses.replace(machine, environ=environ)
    config = load_config({"log_level": "warn"}, machine=machine)
    assert settings_of(config, machine)["log_level"] == (level, origin)


def test_unknown_level_in_the_environment(monkeypatch):
    monkeypatch.setenv("UC_LOGGER_LEVEL", "warns")
    with pytest.raises(ConfigError, match=r"UC_LOGGER_LEVEL is 'warns', which is not a log level: did you mean warn\?"):
        load_config().log_settings()


def test_every_key_is_described():
    for key in KVDepotConfig.key_table():
        assert key.meaning.endswith("."), key.name
        assert key.default is not None or key.facts.by_default, key.name
        assert not key.facts.only or key.facts.instead, key.name
        assert not key.name.endswith("_ms") or key.facts.unit == "ms"
        assert not key.name.endswith("_gb") or key.facts.unit == "GiB"


def test_reference_page_is_in_step():
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    assert page == reference_markdown(), "run: make fix"


def test_memory_is_that_of_this_machine():
    total = int(Path("/proc/meminfo").read_text("ascii").split()[1]) * 1024
    assert 0 < usable_memory_bytes() <= total


def test_import_is_light():
    heavy = "numpy", "torch", "rich", "click", "asyncio"
    code = f"import sys, kvdepot.config; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert found.strip() == "[]"
