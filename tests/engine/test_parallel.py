"""Pipeline and data parallelism: stages store their own layers, replicas share everything that any of them stored."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_lab import Lab
from test_serve import depot_home
from test_vllm import RESET, generate, hits

from tools.demo.__main__ import wait_until_healthy
from tools.demo.client import HITS, Client
from tools.demo.server import Server
from tools.lab.depot import wait_until_clean
from tools.lab.models import prompt

# In eager mode on a CPU, vLLM 0.32 allocates no buffer for what a stage hands to the next one.
STAGES: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 1, "backend": "eager"},
}
FULL = pytest.mark.full
PROMPT_TOKENS, HIT_TOKENS, ANSWER_TOKENS = 400, 384, 8
PROMPTS = [prompt(seed, PROMPT_TOKENS) for seed in range(70, 76)]
CLEAN_S, EXIT_S = 60.0, 120


@pytest.mark.parametrize(
    ("model", "tp"), [("gemma3", 1), pytest.param("llama", 1, marks=FULL), pytest.param("llama", 2, marks=FULL)]
)
def test_two_pipeline_stages_store_and_find_their_own_layers(lab: Lab, model: str, tp: int) -> None:
    """Tokens are those of an engine without stages, cold, from the depot, and from the depot after a restart (P1)."""
    plain = lab.run(model, [generate("plain")], connector=None)["plain"]
    first = lab.run(model, [generate("cold"), RESET, generate("warm")], tp=tp, engine=STAGES)
    assert first["cold"]["tokens"] == plain["tokens"]
    assert first["warm"]["tokens"] == plain["tokens"]
    assert first["warm"]["cached"] == hits(True, model)
    second = lab.run(model, [generate("restarted")], tp=tp, engine=STAGES)
    assert second["restarted"]["tokens"] == plain["tokens"]
    assert second["restarted"]["cached"] == hits(True, model)


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, 2])
def test_two_replicas_of_one_server_share_a_depot(real_lab: Lab, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--data-parallel-size 2``: whichever replica gets a prompt again, it has the hit; answers stay the same."""
    # vLLM requires a NUMA node for each rank, unless thread binding is disabled.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = Path(real_lab.model("llama"))
    sizes = {"data-parallel-size": 2, "tensor-parallel-size": tp}
    log = real_lab.root / "server.log"
    with (
        depot_home(real_lab.root / "home") as home,
        Server(model, home.config, "float32", PROMPT_TOKENS + ANSWER_TOKENS, log, sizes) as server,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):
        client = Client(server.port)
        wait_until_healthy(server, client)

        def answers(prompts: list[list[int]]) -> list[tuple[int, ...]]:
            return [answer.tokens for answer in pool.map(lambda one: client.complete(one, ANSWER_TOKENS), prompts)]

        first = answers(PROMPTS)
        wait_until_clean(home.socket, CLEAN_S)
        before = client.counters(PROMPT_TOKENS * len(PROMPTS))[HITS]
        again = answers(PROMPTS[::-1] + PROMPTS)
        found = client.counters(PROMPT_TOKENS * len(PROMPTS) * 3)[HITS] - before
        os.kill(server.pid, signal.SIGTERM)
        server.wait_for_end(EXIT_S)
    assert again == first[::-1] + first
    assert before == 0
    # Four ranks wait for each other by sched_yield: on two processors the depot may answer late, which is a miss.
    assert found == HIT_TOKENS * len(PROMPTS) * 2 if tp == 1 else found >= HIT_TOKENS * len(PROMPTS)
    replicas = {line.split("pid=")[0] for line in log.read_text().splitlines() if "hit external: 12" in line}
    assert len(replicas) == 2, replicas
