"""A depot that gets no processor reports it: the operator must not look for the fault in a disk."""

import time
from pathlib import Path

from node import NodeDepot

STOP_S = 1.5
LONG_S = 60


def test_a_depot_that_was_not_run_counts_and_logs_it(tmp_path: Path) -> None:
    depot = NodeDepot(tmp_path)
    store = depot.open([4096], {"model": "stalled"})
    try:
        before = store.stats()["depot"]["stalls"]
        with depot.stopped():
            time.sleep(STOP_S)
        end = time.monotonic() + LONG_S
        log = tmp_path / "depot.sock.log"
        while not (
            (seen := store.stats()["depot"])["stalls"] > before
            and seen["stall_max_us"] >= 1e6
            and "the depot stalled: it was not scheduled for" in log.read_text()
        ):
            assert time.monotonic() < end, f"the depot never said that it was stopped: {seen}"
    finally:
        depot.kill()
