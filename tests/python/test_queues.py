"""Engines of one depot queue as much as their own configurations permit."""

import numpy as np
import pytest
from node import NodeDepot

SIZE, TASKS = 4096, 64
# Two threads run dumps, and one task waits.
TAKEN_MAX = 3


@pytest.fixture
def node(tmp_path):
    depot = NodeDepot(tmp_path)
    yield depot
    depot.kill()


def test_queue_depths_are_each_engine_s_own(node):
    deep = node.open([SIZE], {"model": "deep"})
    node.config["waiting_queue_depth"] = 1
    flat = node.open([SIZE], {"model": "flat"})
    assert flat.stats()["depot"]["pid"] == deep.stats()["depot"]["pid"]
    rows = [[np.full(SIZE, index, np.uint8)] for index in range(TASKS)]
    with node.stopped():
        given = {
            store: [store.dump([b"%d" % index], [rows[index]]) for index in range(TASKS)] for store in (deep, flat)
        }
    refused = {store: sum(task.wait().failures.get("busy", 0) for task in tasks) for store, tasks in given.items()}
    assert refused[deep] == 0
    assert refused[flat] >= TASKS - TAKEN_MAX
