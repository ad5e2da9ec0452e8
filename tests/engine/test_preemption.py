"""More requests than fit in the engine's own memory: it preempts some, and they resume through the depot."""

from typing import Any

import pytest
from combinations import combinations
from engine_lab import Lab
from same import EXACT, assert_likely, engine_of
from test_vllm import RESET, ROUNDING, generate

# A request is admitted when its prefill fits, with a complete token budget in each sliding group. The part of that
# beyond the windows is free again in the first decode, so windows alone never exhaust the memory: short prompts, small
# budgets and long answers do, through the full group.
CROWDS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "llama": (300, 150, {"kv_cache_memory_bytes": 40 * 131_072, "max_model_len": 768}),
    "gemma3": (120, 260, {"kv_cache_memory_bytes": 64 * 32_768, "max_model_len": 512}),
    "mla": (120, 260, {"kv_cache_memory_bytes": 30 * 147_456, "max_model_len": 512}),
}

SHARED_AMONG_RANKS = ("llama", "gemma3")
"""Kinds whose heads the ranks divide; each rank has all of MLA's latent KV."""


@pytest.mark.parametrize(("kind", "ranks", "layerwise"), combinations(("llama", 1, False), ("gemma3", 1, True)))
def test_preempted_requests_come_back_right(lab: Lab, kind: str, ranks: int, layerwise: bool) -> None:
    """A small GPU pool: requests are preempted, and their blocks overwritten while dumps may still read them (P3)."""
    prompt_tokens, answer_tokens, limits = CROWDS[kind]
    memory = dict(limits)
    if kind in SHARED_AMONG_RANKS:
        memory["kv_cache_memory_bytes"] //= ranks
    prompts = [[[seed, prompt_tokens]] for seed in range(10, 14)]
    phases = [generate("crowded", prompts, answer_tokens), RESET, generate("again", prompts, answer_tokens)]
    slow = [{"do": "control", "dump_delay_ms": 3, "load_delay_ms": 3}] if lab.native == "fake" else []
    options = {"use_layerwise": layerwise}
    crowded = lab.run(kind, [*slow, *phases], tp=ranks, options=options, engine={**engine_of(kind), **memory})
    assert crowded["metrics"].get("vllm:num_preemptions", 0) > 0
    assert crowded["metrics"].get("vllm:external_prefix_cache_hits", 0) > 0
    assert sum(crowded["again"]["cached"]) > 0
    if kind in EXACT:
        roomy = lab.run(kind, [generate("roomy", prompts, answer_tokens)], connector=None)
        assert crowded["crowded"]["tokens"] == roomy["roomy"]["tokens"]
        assert crowded["again"]["tokens"] == roomy["roomy"]["tokens"]
        assert all(apart < ROUNDING for apart in lab.conflicts())
    else:
        assert_likely(lab, kind, prompts, crowded["crowded"]["tokens"], crowded["again"]["tokens"])
