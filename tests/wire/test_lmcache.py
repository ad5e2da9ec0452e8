"""LMCache's own storage manager and ``infinistore://`` connector, unmodified, store to and load from the server.

The connector speaks RDMA only; it runs over the stand-in for libibverbs.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tools.lab.ports import LOOPBACK
from tools.wire.servers import ROOT, Server, preload

LMCACHE_S = 300
CHUNKS = 16

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(2 * LMCACHE_S + 60)]

LMCache = Callable[[str, int], dict[str, Any]]


@pytest.fixture
def lmcache(server: Server) -> LMCache:
    """Runs LMCache in a new process: an action on ``count`` chunks, starting at a number."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("LMCache needs torch: run make vllm-env, then make infinistore-env")

    def act(action: str, first: int) -> dict[str, Any]:
        url = f"infinistore://{LOOPBACK}:{server.port}/?device={server.device}"
        done = subprocess.run(
            [sys.executable, "-m", "tools.wire.lmcache_child", url, action, str(first), str(CHUNKS)],
            env={**os.environ, **preload(server.library)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LMCACHE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert result.pop("connected"), done.stdout + done.stderr
        return result

    return act


def test_chunks_come_back_in_another_process(lmcache: LMCache, server: Server) -> None:
    assert lmcache("store", 0) == {"waiting": 0, "failed": 0}
    assert server.kvmap_len() == CHUNKS
    assert lmcache("load", 0) == {
        "contains": [True] * CHUNKS,
        "prefix": CHUNKS,
        "at_once": ["whole"] * CHUNKS,
        "one_by_one": ["whole"] * CHUNKS,
    }


def test_nothing_comes_back_of_what_was_not_stored(lmcache: LMCache) -> None:
    missing = ["miss"] * CHUNKS
    assert lmcache("load", 0) == {
        "contains": [False] * CHUNKS,
        "prefix": 0,
        "at_once": missing,
        "one_by_one": missing,
    }


@pytest.mark.peer_fault_sometimes("an error's answer overtakes data's: chunks that are there are told as misses")
def test_what_is_there_comes_back_around_holes(lmcache: LMCache) -> None:
    lmcache("store-holes", 0)
    found = lmcache("load", 0)
    right = ["whole" if number % 3 else "miss" for number in range(CHUNKS)]
    assert found["one_by_one"] == right
    assert found["at_once"] == right
    assert found["prefix"] == 0
