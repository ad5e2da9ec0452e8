"""Real vLLM with its own offloading on a CPU, and the depot below it: the same tokens, and hits where there must be."""

from typing import Any

import pytest
from engine_lab import EngineRun, Lab
from offloading_lab import FORGET, IDLE, offloading
from test_vllm import RESET, generate

LONG, SHORT, EVEN = [[1, 600]], [[2, 350]], [[3, 320]]
PROMPTS = [LONG, SHORT, EVEN]
HITS = [576, 320, 320]


def run(lab: Lab, *phases: dict[str, Any], model: str = "llama", tp: int = 1, **extra: Any) -> EngineRun:
    return lab.run(model, list(phases), tp=tp, beside=offloading(**extra))


def test_same_tokens_cold_warm_and_after_a_restart(real_lab: Lab) -> None:
    settle = {"do": "settle", "socket": real_lab.socket}
    first = run(
        real_lab,
        {"do": "tier_attached"},
        generate("cold", PROMPTS, 8),
        FORGET,
        generate("warm", PROMPTS, 8),
        IDLE,
        settle,
        {"do": "tier_counts", "name": "counts"},
    )
    print(first.log)
    print(first.results)
    assert first["cold"]["cached"] == [0, 0, 0]
    assert first["warm"]["tokens"] == first["cold"]["tokens"]
    assert first["warm"]["cached"] == HITS
    second = run(real_lab, {"do": "tier_attached"}, generate("restarted", PROMPTS, 8), {"do": "tier_counts", "name": "counts"})
    print(second.results)
    assert second["restarted"]["tokens"] == first["cold"]["tokens"]
    assert second["restarted"]["cached"] == HITS
