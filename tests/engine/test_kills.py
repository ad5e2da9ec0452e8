"""kill -9 of the engine, of its depot, or of both, under load (P1, P4, P5, P6)."""

import json
import subprocess

import pytest
from engine_lab import REPOSITORY, Lab

ROUND_S = 60


def test_whoever_is_killed_leaves_nothing_behind(real_lab: Lab, request: pytest.FixtureRequest) -> None:
    """Rounds of ``tools.lab.kill_engine``; its last line says what was seen, its first the seed."""
    kills = int(request.config.getoption("--kills"))
    found = subprocess.run(
        [real_lab.python, "-m", "tools.lab.kill_engine", "--kills", str(kills)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=(kills + 3) * ROUND_S,
        check=False,
    )
    print(found.stderr)
    assert found.returncode == 0, found.stderr
    seen = json.loads(found.stdout.splitlines()[-1])
    assert sum(seen["kills"].values()) == kills
    assert seen["tokens_found"] > 0
    assert seen["bytes_seen_max"] <= seen["bytes_max"]
