"""Real vLLM over a tier that never answers: computing is faster, so a request does not wait for it (P9)."""

from typing import Any

from engine_lab import Lab
from test_vllm import RESET, generate

LONG = [[[seed, 600]] for seed in range(60, 64)]
"""Several hundred tokens per step: enough steps to measure the cost of computing."""


def one_by_one(name: str) -> dict[str, Any]:
    return {**generate(name, LONG, 4), "one_by_one": True}


def test_a_request_does_not_wait_for_a_tier_that_is_slower_than_computing(fake_lab: Lab) -> None:
    never = {"do": "control", "unsettled_polls": 1 << 40}
    run = fake_lab.run(
        "llama",
        [one_by_one("cold"), RESET, never, one_by_one("slow"), {"do": "control"}, RESET, one_by_one("warm")],
        options={"load_policy": "faster", "timeout_ms": 300_000},
    )
    assert run["slow"]["tokens"] == run["cold"]["tokens"] == run["warm"]["tokens"]
    assert run["slow"]["cached"] == [0] * len(LONG)
    assert run["metrics"]["vllm:kvdepot_misses/slower"] == len(LONG)
    assert all(run["warm"]["cached"]), "nothing is remembered of it that keeps fast blocks away"
