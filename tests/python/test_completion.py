"""Completion of commands and options in a shell."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).parent / "kvdepot")
OFFERED = [
    (["kvdepot", "na"], {"namespaces"}),
    (["kvdepot", "config", "ch"], {"check"}),
    (["kvdepot", "completion", ""], {"bash", "fish", "zsh"}),
    (["kvdepot", "stat", "--js"], {"--json"}),
]


@pytest.mark.parametrize(("words", "offered"), OFFERED)
def test_commands_options_and_values_are_offered(words: list[str], offered: set[str]) -> None:
    asked = {"_KVDEPOT_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    found = subprocess.run([COMMAND], env={**os.environ, **asked}, check=True, capture_output=True, text=True).stdout
    assert {line.partition(",")[2] for line in found.splitlines()} == offered


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_the_script_is_valid_in_its_shell(shell: str) -> None:
    """Where the shell is installed, it accepts the script and completes kvdepot with it."""
    script = subprocess.run([COMMAND, "completion", shell], check=True, capture_output=True, text=True).stdout
    assert "_KVDEPOT_COMPLETE" in script
    if shell == "bash" and shutil.which("bash"):
        lines = [script, "complete -p kvdepot"]
        found = subprocess.run(["bash", "--norc", "-c", "\n".join(lines)], check=True, capture_output=True, text=True)
        assert found.stdout.startswith("complete -o nosort -F _kvdepot_completion kvdepot")
