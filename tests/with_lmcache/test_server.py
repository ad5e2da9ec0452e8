"""Real vLLM on CPU, LMCache's own server, our L2 adapter and a depot: kill -9 of everything (P1, P4, P6)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chunks import until
from conftest import settings

from tools.lab.depot import DepotHome
from tools.lab.rounds import ROOT
from tools.lmcache.server import CHUNK_TOKENS, LMCacheServer, depot_adapter
from tools.lmcache.vllm import Engine

PROMPT = {"seed": 1, "count": 2, "tokens": 1030}
WHOLE = [1030 // CHUNK_TOKENS * CHUNK_TOKENS] * 2
NOTHING = [0, 0]
MODEL_S = 120


@pytest.fixture(scope="session")
def model() -> str:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs a real vLLM: make test-lmcache")
    directory = Path(os.environ.get("KVDEPOT_MODELS", "/tmp/kvdepot-models")) / "llama"
    if not (directory / "config.json").exists():
        make = [sys.executable, str(ROOT / "tools" / "make_model.py"), str(directory)]
        subprocess.run([*make, "--architecture", "llama", "--layers", "4"], check=True, timeout=MODEL_S)
    return str(directory)


def stored(server: LMCacheServer, chunks: int) -> bool:
    return server.adapter()["counts"].get("dumped", 0) >= chunks


def parked(home: DepotHome, server: LMCacheServer) -> None:
    """Waits until the prompts' chunks are in the depot."""
    until(lambda: stored(server, sum(WHOLE) // CHUNK_TOKENS), "the dumps")


@pytest.mark.timeout(600)
def test_answers_are_the_same_whatever_is_killed(tmp_path: Path, home: DepotHome, model: str) -> None:
    adapter = depot_adapter(settings(home))
    seen: dict[str, Any] = {}
    with (
        home.start() as depot,
        LMCacheServer(tmp_path / "first", adapter) as server,
        Engine(tmp_path, model, server.port) as vllm,
    ):
        seen["cold"] = vllm.ask(**PROMPT)
        parked(home, server)
        depot.wait_until_clean(60)
        # All three are killed here.
    with LMCacheServer(tmp_path / "second", adapter) as server, Engine(tmp_path, model, server.port) as vllm:
        with home.start() as depot:
            until(lambda: depot.stats() is not None, "the depot")
            seen["restarted"] = vllm.ask(**PROMPT)
            until(lambda: server.adapter()["locked"] == 0, "LMCache unlocks what it has loaded")
            loaded = server.adapter()["counts"]
            server.forget()
            depot.kill()
            seen["depot dead"] = vllm.ask(**PROMPT)
            dead = server.adapter()
            server.forget()
        with home.start():
            until(lambda: server.adapter()["attached"], "the adapter finds the new depot")
            seen["depot back"] = vllm.ask(**PROMPT)
    print(json.dumps(seen))
    answers = [one["tokens"] for one in seen.values()]
    assert answers == answers[:1] * len(seen)
    assert {name: one["cached"] for name, one in seen.items()} == {
        "cold": NOTHING,
        "restarted": WHOLE,
        "depot dead": NOTHING,
        "depot back": WHOLE,
    }
    assert loaded["loaded"] == sum(WHOLE) // CHUNK_TOKENS
    # What another server has stored is leased for the load, if the tier answers in time.
    assert loaded.get("leased", 0) + loaded.get("not_leased", 0) == sum(WHOLE) // CHUNK_TOKENS
    assert not dead["attached"]
    assert dead["is_healthy"]
