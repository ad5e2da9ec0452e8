"""Requests with one prefix that come at the same time: the prefix is loaded once, and all of them compute on it."""

from typing import Any

import pytest
from engine_lab import Lab
from test_hardship import one_by_one, settle
from test_vllm import RESET, generate

REQUESTS = 6
SHARED_BLOCKS, OWN_BLOCKS = 16, 2
BLOCKS, BLOCK = SHARED_BLOCKS + OWN_BLOCKS, 32
PROMPTS: list[Any] = [[[1, SHARED_BLOCKS * BLOCK], [10 + number, OWN_BLOCKS * BLOCK + 8]] for number in range(REQUESTS)]


@pytest.mark.parametrize("layerwise", [False, True])
def test_requests_at_the_same_time_load_their_prefix_once(real_lab: Lab, layerwise: bool) -> None:
    run = real_lab.run(
        "llama",
        [one_by_one("cold", PROMPTS), settle(real_lab), RESET, generate("together", PROMPTS, 16)],
        options={"use_layerwise": layerwise},
    )
    assert run["together"]["tokens"] == run["cold"]["tokens"]
    assert run["together"]["cached"] == [BLOCKS * BLOCK] * REQUESTS
    assert run["metrics"]["vllm:kvdepot_load_blocks"] == SHARED_BLOCKS + REQUESTS * OWN_BLOCKS
    waited = 0 if layerwise else (REQUESTS - 1) * SHARED_BLOCKS * BLOCK
    assert run["metrics"].get("vllm:kvdepot_shared_load_tokens", 0) == waited


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_identical_requests_load_once_between_steps(real_lab: Lab, kind: str) -> None:
    """With windows, too: what one load brings is then all that the others need."""
    options, one = {"use_layerwise": False}, PROMPTS[:1]
    alone = real_lab.run(
        kind, [one_by_one("cold", one), settle(real_lab), RESET, one_by_one("warm", one)], options=options
    )
    together = real_lab.run(kind, [generate("warm", one * REQUESTS, 16)], options=options)
    assert alone["warm"]["tokens"] == alone["cold"]["tokens"]
    assert together["warm"]["tokens"] == alone["cold"]["tokens"] * REQUESTS
    assert together["warm"]["cached"] == alone["warm"]["cached"] * REQUESTS == [BLOCKS * BLOCK] * REQUESTS
    loaded = [run["metrics"]["vllm:kvdepot_load_blocks"] for run in (alone, together)]
    assert loaded[0] == loaded[1] > 0


def test_requests_of_whole_blocks_load_only_their_last_block_again(real_lab: Lab) -> None:
    """vLLM's own cache leaves a token of a prompt to compute, and with it the last block."""
    options, whole = {"use_layerwise": False}, [[[3, BLOCKS * BLOCK]]]
    alone = real_lab.run("llama", [one_by_one("cold", whole), settle(real_lab)], options=options)
    together = real_lab.run("llama", [generate("warm", whole * REQUESTS, 16)], options=options)
    assert together["warm"]["tokens"] == alone["cold"]["tokens"] * REQUESTS
    assert together["metrics"]["vllm:kvdepot_load_blocks"] == BLOCKS + REQUESTS - 1
    assert together["metrics"]["vllm:kvdepot_shared_load_tokens"] == (REQUESTS - 1) * (BLOCKS - 1) * BLOCK
