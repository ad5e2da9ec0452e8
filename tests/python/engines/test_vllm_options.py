"""The connector's options, which vLLM asks for several times in every process."""

import os
from pathlib import Path
from typing import Any

import pytest

from kvdepot.config import KVDepotConfig, load_config
from kvdepot.engines.vllm import options
from kvdepot.engines.vllm.options import read_options
from kvdepot.errors import ConfigError


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Returns what was read, in order."""
    found: list[object] = []

    def counted(source: Any, **more: Any) -> KVDepotConfig:
        found.append(source)
        return load_config(source, **more)

    monkeypatch.setattr(options, "load_config", counted)
    options._read.cache_clear()
    return found


def test_a_configuration_is_read_once(reads: list[object], tmp_path: Path) -> None:
    file = tmp_path / "depot.yaml"
    file.write_text("timeout_ms: 1234\n")
    for extra in ({"config": str(file)}, {"timeout_ms": 1234}):
        reads.clear()
        first = read_options(extra)
        assert read_options(dict(extra)) == first
        assert first.timeout_ms == 1234
        assert len(reads) == 1


def test_a_file_that_has_changed_is_read_again(reads: list[object], tmp_path: Path) -> None:
    file = tmp_path / "depot.yaml"
    for number in (1000, 2000):
        file.write_text(f"timeout_ms: {number}\n")
        os.utime(file, ns=(number, number))
        assert read_options({"config": str(file)}).timeout_ms == number
    assert len(reads) == 2


def test_a_variable_that_has_changed_is_read_again(
    reads: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "depot.yaml"
    file.write_text("pipeline: Cache\n")
    for number in (1000, 2000):
        monkeypatch.setenv("KVDEPOT_TIMEOUT_MS", str(number))
        assert read_options({"config": str(file)}).timeout_ms == number


def test_a_mistake_is_told_each_time(reads: list[object]) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError):
            read_options({"timeout_ms": "soon"})
    assert len(reads) == 2


def test_what_is_no_json_is_read_as_it_is(reads: list[object]) -> None:
    with pytest.raises(ConfigError):
        read_options({"timeout_ms": object()})
