"""A hybrid of Mamba and attention layers: states at block boundaries, as vLLM's own prefix cache keeps them."""

import pytest
from engine_lab import Lab
from test_vllm import RESET, generate

# A step never computes beyond the end of a block: on a CPU, vLLM's kernel fails if it does (IndexError).
ALIGN = {"enable_prefix_caching": True, "mamba_cache_mode": "align", "block_size": 256, "max_num_batched_tokens": 256}

PROMPTS = [[[1, 600]], [[2, 350]], [[3, 512]]]
# All four prompts fit, but not all answers.
BLOCKS_OF_A_CROWD = 18
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


def test_loads_of_states_that_fail_are_computed(real_lab: Lab) -> None:
    """Blocks are lost between claim and load: vLLM computes the request again (P2); nothing wrong is stored (P1)."""
    longer = [[[1, 600], [7, 250]], [[2, 350], [8, 200]]]
    run = real_lab.run(
        "granite",
        [
            generate("cold", PROMPTS),
            RESET,
            generate("computed", longer),
            {"do": "reset_all"},
            generate("cold again", PROMPTS),
            RESET,
            {"do": "control", "fail_load_every": 2},
            generate("failing", PROMPTS),
            RESET,
            generate("failing longer", longer),
            {"do": "control"},
            RESET,
            generate("after", PROMPTS),
            RESET,
            generate("after longer", longer),
        ],
        engine=ALIGN,
        options={"on_reset": "drop"},
    )
    assert "blocks failed to load" in run.log
    assert run["failing"]["finish"] == ["length"] * 3
    assert run["after"]["cached"] == HITS
    assert run["after longer"]["cached"] == [768, 512]
    for name in ("cold again", "failing", "after"):
        assert run[name]["tokens"] == run["cold"]["tokens"], name
    for name in ("failing longer", "after longer"):
        assert run[name]["tokens"] == run["computed"]["tokens"], name


def test_preempted_requests_with_states_come_back_right(real_lab: Lab) -> None:
    prompts = [[[seed, 300]] for seed in range(10, 14)]
    crowd = {**ALIGN, "num_gpu_blocks_override": BLOCKS_OF_A_CROWD, "max_model_len": 768}
    phases = [generate("crowded", prompts, 230), RESET, generate("again", prompts, 230)]
    crowded = real_lab.run("granite", phases, engine=crowd)
    roomy = real_lab.run("granite", [generate("roomy", prompts, 230)], engine=ALIGN, connector=None)
    assert crowded["metrics"].get("vllm:num_preemptions", 0) > 0
    assert crowded["metrics"].get("vllm:external_prefix_cache_hits", 0) > 0
    assert sum(crowded["again"]["cached"]) > 0
    assert crowded["crowded"]["tokens"] == crowded["again"]["tokens"] == roomy["roomy"]["tokens"]
