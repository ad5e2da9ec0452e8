"""P1, P4: kill -9 of server and clients under load. benches/wire/kills.py does it any number of times."""

import random
from pathlib import Path

import pytest

from benches.wire.kills import kills
from tools.wire.servers import STANDIN, standin_verbs

KILLS = 6


@pytest.mark.timeout(600)  # each wait has a limit of its own
@pytest.mark.peer_fault_sometimes("a writer that dies in the middle leaves a key whose get ends the server")
def test_kills_under_load_leave_nothing_wrong(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    kind = request.config.getoption("--server")
    if kind == "infinistore" and standin_verbs() is None:
        pytest.skip(f"InfiniStore's server needs a stand-in for libibverbs, named by {STANDIN}")
    outcome = kills(kind, KILLS, random.randrange(1 << 30), tmp_path)
    assert not outcome.faults, outcome
