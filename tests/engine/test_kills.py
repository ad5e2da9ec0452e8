"""kill -9 of the engine, of one of its ranks, of its depot, or of both, under load (P1, P4, P5, P6)."""

import json
import subprocess

import pytest
from engine_lab import REPOSITORY, Lab
from same import KINDS

ROUND_S = 200
CASES = [(kind, ranks) for kind in KINDS for ranks in (1, 2)]
IN_CI = (("llama", 1),)


@pytest.mark.timeout(0)  # the rounds have a limit of their own, as many as they are
@pytest.mark.parametrize(
    ("kind", "ranks"),
    [pytest.param(*one, marks=() if one in IN_CI else pytest.mark.full) for one in CASES],
)
def test_whoever_is_killed_leaves_nothing_behind(
    real_lab: Lab, request: pytest.FixtureRequest, kind: str, ranks: int
) -> None:
    """Runs rounds of ``tools.lab.kill_engine``; its first line has the seed, its last line the result."""
    kills = int(request.config.getoption("--kills"))
    real_lab.model(kind)  # skips where this machine cannot run it
    command = [real_lab.python, "-m", "tools.lab.kill_engine", "--model", kind, "--ranks", str(ranks)]
    found = subprocess.run(
        [*command, "--kills", str(kills)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=(kills + 3) * ROUND_S * ranks,
        check=False,
    )
    print(found.stderr)
    assert found.returncode == 0, found.stderr
    seen = json.loads(found.stdout.splitlines()[-1])
    assert sum(seen["kills"].values()) == kills
    assert seen["tokens_found"] > 0
    assert seen["bytes_seen_max"] <= seen["bytes_max"]
