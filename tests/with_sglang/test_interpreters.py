"""A test that needs another engine's environment is skipped without it, but not where ``make test-full`` names it."""

from pathlib import Path

import pytest
from conftest import interpreter

VARIABLE = "KVDEPOT_SGLANG_OLD_PYTHON"


def test_an_environment_that_is_not_there_skips_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(pytest.skip.Exception, match="make sglang-old-env"):
        interpreter(VARIABLE, ".venv-that-nobody-makes", "sglang-old-env")


def test_an_interpreter_that_is_named_must_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "python"))
    with pytest.raises(pytest.fail.Exception, match="make sglang-old-env"):
        interpreter(VARIABLE, ".venv-sglang-old", "sglang-old-env")
    (tmp_path / "python").touch()
    assert interpreter(VARIABLE, ".venv-sglang-old", "sglang-old-env") == str(tmp_path / "python")
