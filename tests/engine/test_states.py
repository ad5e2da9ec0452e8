"""A hybrid of Mamba and attention layers: states at block boundaries, as vLLM's own prefix cache keeps them."""

import pytest
from engine_lab import Lab
from test_vllm import RESET, generate

# A step never computes beyond the end of a block: on a CPU, vLLM's kernel fails if it does (IndexError).
ALIGN = {"enable_prefix_caching": True, "mamba_cache_mode": "align", "block_size": 256, "max_num_batched_tokens": 256}

PROMPTS = [[[1, 600]], [[2, 350]], [[3, 512]]]
# Whole blocks. A token stays to be computed, so a prompt that ends with a block loses it.
HITS = [512, 256, 256]


@pytest.mark.parametrize(
    ("tp", "layerwise"),
    [(1, False), pytest.param(1, True, marks=pytest.mark.full), pytest.param(2, False, marks=pytest.mark.full)],
)
def test_same_tokens_cold_warm_and_after_a_restart(real_lab: Lab, tp: int, layerwise: bool) -> None:
    options = {"use_layerwise": layerwise}
    longer = [[[1, 600], [7, 90]], [[2, 350], [8, 10]], [[1, 500]]]
    plain = real_lab.run("granite", [generate("cold", PROMPTS)], tp=tp, engine=ALIGN, connector=None)
    phases = [generate("cold", PROMPTS), generate("own cache", PROMPTS), RESET, generate("warm", PROMPTS)]
    first = real_lab.run("granite", [*phases, RESET, generate("longer", longer)], tp=tp, engine=ALIGN, options=options)
    assert "self-test" not in first.log
    cold = first["cold"]
    assert cold["tokens"] == plain["cold"]["tokens"]
    assert first["warm"]["cached"] == HITS
    assert first["warm"]["tokens"] == first["own cache"]["tokens"] == cold["tokens"]
    phases = [generate("restarted", PROMPTS), RESET, generate("longer", longer)]
    second = real_lab.run("granite", phases, tp=tp, engine=ALIGN, options=options)
    assert second["restarted"]["cached"] == HITS
    assert second["restarted"]["tokens"] == cold["tokens"]
    assert second["longer"]["tokens"] == first["longer"]["tokens"]
