"""A real ``vllm serve`` with the depot's connector and vLLM's own offloading below `MultiConnector`, in both orders.

API server and engine are processes of their own: the API server shows what each connector counted in the engine.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from engine_lab import REPOSITORY, Lab
from offloading_lab import MEMORY_BYTES
from test_serve import ANSWER_TOKENS, EXIT_S, HIT_TOKENS, PROMPT_TOKENS, depot_home

from kvdepot.cli.running import ask
from tools.demo.__main__ import wait_until_healthy
from tools.demo.client import Client
from tools.demo.server import Server
from tools.lab.depot import DepotHome
from tools.lab.models import prompt

OURS = "vllm:kvdepot_hit_tokens_total"
STORED = "vllm:kvdepot_dump_blocks_total"
OFFLOADED, LOADED_BACK = "vllm:kv_offload_store_bytes_total", "vllm:kv_offload_load_bytes_total"
REACHES_API_SERVER_S = 60.0
POLL_S = 0.1
SHORT = prompt(2, 8)


def both(home: DepotHome, first: str) -> dict[str, Any]:
    depot = {
        "kv_connector": "KVDepotConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"config": str(home.config)},
    }
    # vLLM copies on GPUs alone: the benchmarks' spec does it on a CPU, the rest is vLLM's own.
    on_a_cpu = {"spec_name": "HostCpuSpec", "spec_module_path": "benches.engine.native_offload_shim"}
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**on_a_cpu, "cpu_bytes_to_use": MEMORY_BYTES},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [depot, offloading] if first == "depot" else [offloading, depot]},
    }


def wait_for(client: Client, counter: str) -> int:
    """Returns a counter once it is above 0: it grows in the engine's steps, which need requests."""
    end_s = time.monotonic() + REACHES_API_SERVER_S
    while not (value := client.counter(counter)):
        assert time.monotonic() < end_s, f"{counter} has not reached the API server"
        client.complete(SHORT, 2)
    return value


def wait_for_blocks(home: DepotHome) -> None:
    """Waits until the depot has sealed the prompt's blocks: a dump goes on after its request has ended."""
    end_s = time.monotonic() + REACHES_API_SERVER_S
    while (depot := ask(str(home.socket))) is None or depot.stats["dump_blocks_sealed"] < HIT_TOKENS // 32:
        assert time.monotonic() < end_s, "the depot has not stored the prompt"
        time.sleep(POLL_S)


def served(home: DepotHome, model: Path, first: str, log: Path) -> tuple[list[tuple[int, ...]], list[int], int]:
    """Sends the same prompt twice. Returns the answers, our hit tokens after each, and bytes that offloading loaded."""
    more = {"kv-transfer-config": json.dumps(both(home, first))}
    with Server(model, home.config, "float32", PROMPT_TOKENS + ANSWER_TOKENS, log, more) as server:
        client = Client(server.port)
        wait_until_healthy(server, client)
        answers, hits = [], []
        for _ in range(2):
            answers.append(client.complete(prompt(1, PROMPT_TOKENS), ANSWER_TOKENS).tokens)
            wait_for(client, OFFLOADED)
            wait_for_blocks(home)
            hits.append(client.counter(OURS))
        assert client.counter("vllm:kvdepot_attached") == 1
        loaded = wait_for(client, LOADED_BACK) if first == "offloading" else client.counter(LOADED_BACK)
        if first == "depot":
            assert wait_for(client, STORED) >= HIT_TOKENS // 32
        os.kill(server.pid, signal.SIGTERM)
        server.wait_for_end(EXIT_S)
    return answers, hits, loaded


@pytest.fixture
def with_the_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers can import the benchmarks' host copy."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(REPOSITORY)]))


@pytest.mark.usefixtures("with_the_shim")
def test_the_api_server_shows_what_both_counted(real_lab: Lab) -> None:
    with depot_home(real_lab.root / "home") as home:
        model = Path(real_lab.model("llama"))
        answers, hits, loaded = served(home, model, "depot", real_lab.root / "server.log")
    assert hits == [0, HIT_TOKENS]
    assert loaded == 0
    assert len({*answers}) == 1


@pytest.mark.full
@pytest.mark.usefixtures("with_the_shim")
def test_the_first_connector_loads(real_lab: Lab) -> None:
    model = Path(real_lab.model("llama"))
    with depot_home(real_lab.root / "home") as home:
        answers, hits, loaded = served(home, model, "depot", real_lab.root / "depot.log")
        assert hits == [0, HIT_TOKENS]
        assert loaded == 0
        # A new engine: offloading has nothing yet, and asks the depot next. What the depot loaded is offloaded, too.
        again, hits, loaded = served(home, model, "offloading", real_lab.root / "offloading.log")
        assert hits == [HIT_TOKENS, HIT_TOKENS]
        assert loaded > 0
    assert len({*answers, *again}) == 1
