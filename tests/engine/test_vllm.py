"""Real vLLM on a CPU with the connector: the same tokens, wherever the KV came from."""

from typing import Any

import pytest
from combinations import combinations
from engine_lab import EngineRun, Lab
from same import EXACT

# Lengths on and off block boundaries (32 tokens), one longer than a step's token budget (256).
LONG, SHORT, EVEN = [[1, 600]], [[2, 350]], [[3, 320]]
PROMPTS = [LONG, SHORT, EVEN]
DECODED = 40
ROUNDING = 1e-3


def generate(name: str, prompts: list[Any] = PROMPTS, max_tokens: int = DECODED) -> dict[str, Any]:
    return {"do": "generate", "name": name, "prompts": prompts, "max_tokens": max_tokens}


RESET = {"do": "reset"}


def hits(layerwise: bool, model: str) -> list[int]:
    """Returns the hit of a repeated prompt: full blocks, but a token stays to be computed where the hit must leave
    one."""
    leaves_one = layerwise or model == "gemma3"
    return [576, 320, 288 if leaves_one else 320]


ONE_WAY = [True, pytest.param(False, marks=pytest.mark.full)]
ONE_MODEL = ["llama", pytest.param("gemma3", marks=pytest.mark.full)]


@pytest.mark.parametrize(
    ("model", "tp", "layerwise"),
    combinations(("llama", 2, True), ("gemma3", 1, False), kinds=EXACT),
)
def test_same_tokens_cold_warm_and_after_a_restart(lab: Lab, model: str, tp: int, layerwise: bool) -> None:
    """Outputs do not depend on where the KV came from (P1); a new engine finds blocks of an earlier one."""
    options = {"use_layerwise": layerwise}
    longer = [[[1, 600], [7, 90]], [[2, 350], [8, 10]]]
    first = lab.run(
        model,
        [generate("cold"), generate("own cache"), RESET, generate("warm"), RESET, generate("longer", longer)],
        tp=tp,
        options=options,
    )
    cold = first["cold"]
    assert cold["cached"] == [0, 0, 0]
    assert first["own cache"]["tokens"] == cold["tokens"]
    assert first["warm"]["tokens"] == cold["tokens"]
    assert first["warm"]["cached"] == hits(layerwise, model)
    assert first["longer"]["cached"][0] >= 576
    assert "hit hbm: 0, hit external: 18" in first.log
    assert "self-test" not in first.log

    second = lab.run(model, [generate("restarted"), RESET, generate("longer", longer)], tp=tp, options=options)
    assert second["restarted"]["tokens"] == cold["tokens"]
    assert second["restarted"]["cached"] == hits(layerwise, model)
    assert second["longer"]["tokens"] == first["longer"]["tokens"]
    assert all(apart < ROUNDING for apart in lab.conflicts())


@pytest.mark.parametrize("layerwise", ONE_WAY)
def test_one_copy_of_latent_kv_for_all_ranks(lab: Lab, layerwise: bool) -> None:
    """MLA: two ranks share the dumps, both load; one rank finds what two have stored, and vice versa.

    Latent attention on a CPU is fast in bfloat16 only, where batches of other shapes round differently. So requests run
    one by one, and equal hits are compared: vLLM's own cache, the depot, the depot after a restart.
    """
    prompts = [[[1, 257]], [[2, 300]], [[3, 290]]]
    options = {"use_layerwise": layerwise}

    def one_by_one(name: str) -> dict[str, Any]:
        return {**generate(name, prompts, 8), "one_by_one": True}

    def run(tp: int, *phases: dict[str, Any]) -> EngineRun:
        return lab.run("mla", list(phases), tp=tp, options=options, engine={"dtype": "bfloat16"})

    two = run(2, one_by_one("cold"), one_by_one("own cache"), RESET, one_by_one("warm"))
    assert "one of 2 ranks that share its dumps" in two.log
    assert two["own cache"]["cached"] == two["warm"]["cached"] == [256, 288, 288]
    assert two["warm"]["tokens"] == two["own cache"]["tokens"]
    one = run(1, one_by_one("warm"), one_by_one("own cache"))
    assert one["warm"]["cached"] == [256, 288, 288]
    assert one["warm"]["tokens"] == one["own cache"]["tokens"]
    again = run(2, one_by_one("warm"))
    assert again["warm"]["tokens"] == two["warm"]["tokens"]


@pytest.mark.parametrize("model", ONE_MODEL)
def test_connector_changes_no_token(lab: Lab, model: str) -> None:
    plain = lab.run(model, [generate("cold")], connector=None)
    depot = lab.run(model, [generate("cold")])
    assert depot["cold"]["tokens"] == plain["cold"]["tokens"]


@pytest.mark.parametrize(("model", "tp", "layerwise"), combinations(("gemma3", 2, True), kinds=EXACT))
def test_failed_loads_are_computed(fake_lab: Lab, model: str, tp: int, layerwise: bool) -> None:
    """A failed load costs time, never a request or a token (P2), and poisons nothing stored after it (P1)."""
    trouble = {"do": "control", "fail_load_every": 7, "fail_rank": 0}
    longer = [[[1, 600], [7, 90]], [[2, 350], [8, 40]]]
    run = fake_lab.run(
        model,
        [
            generate("cold"),
            RESET,
            generate("computed", longer),
            {"do": "reset_all"},
            generate("cold again"),
            RESET,
            trouble,
            generate("failing"),
            RESET,
            generate("failing longer", longer),
            {"do": "control"},
            RESET,
            generate("after"),
            RESET,
            generate("after longer", longer),
        ],
        tp=tp,
        options={"use_layerwise": layerwise, "on_reset": "drop"},
    )
    assert "blocks failed to load" in run.log
    assert run["failing"]["finish"] == ["length"] * 3
    for name in ("cold again", "failing", "after"):
        assert run[name]["tokens"] == run["cold"]["tokens"], name
    for name in ("failing longer", "after longer"):
        assert run[name]["tokens"] == run["computed"]["tokens"], name
    assert run["after longer"]["cached"][0] > 600
    assert all(apart < ROUNDING for apart in fake_lab.conflicts())


@pytest.mark.parametrize("layerwise", ONE_WAY)
def test_dead_depot_costs_nothing(fake_lab: Lab, layerwise: bool) -> None:
    """The depot dies between and during requests, and comes back (P6)."""
    run = fake_lab.run(
        "llama",
        [
            generate("cold"),
            RESET,
            {"do": "control", "dead": True},
            generate("dead"),
            RESET,
            {"do": "control"},
            generate("back"),
        ],
        options={"use_layerwise": layerwise},
    )
    assert run["dead"]["tokens"] == run["back"]["tokens"] == run["cold"]["tokens"]
    assert run["dead"]["cached"] == [0, 0, 0]
    assert run["back"]["cached"] == hits(layerwise, "llama")


def test_engine_core_in_a_process_of_its_own(lab: Lab) -> None:
    """As in servers: scheduler, workers and front end are three processes that reach one depot."""
    run = lab.run(
        "llama",
        [generate("cold"), RESET, generate("warm")],
        tp=2,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    assert run["warm"]["tokens"] == run["cold"]["tokens"]
    assert run["warm"]["cached"] == hits(True, "llama")


def test_reset_forgets_everything(lab: Lab) -> None:
    """``on_reset: drop``: nothing dumped before a reset is served again, to any engine."""
    phases = [generate("cold"), {"do": "reset_all"}, generate("reset"), RESET, generate("warm")]
    run = lab.run("llama", phases, options={"on_reset": "drop"})
    assert run["reset_all"] is True
    assert run["reset"]["cached"] == [0, 0, 0]
    assert run["warm"]["cached"] == hits(True, "llama")


def test_corrupt_copies_turn_the_connector_off(fake_lab: Lab) -> None:
    """The self-test notices bytes that do not survive a round trip; the engine goes on without a depot."""
    fake_lab.control.parent.mkdir(parents=True, exist_ok=True)
    plain = fake_lab.run("llama", [generate("cold")], connector=None)
    run = fake_lab.run("llama", [generate("cold"), RESET, generate("warm")], environment={"KVDEPOT_FAKE_CORRUPT": "1"})
    assert "the bytes read back differ from those written" in run.log
    assert run["cold"]["tokens"] == run["warm"]["tokens"] == plain["cold"]["tokens"]
    assert run["warm"]["cached"] == [0, 0, 0]


@pytest.mark.parametrize(
    ("model", "tp", "corrupt"),
    [
        ("llama", 1, False),
        ("llama", 1, True),
        pytest.param("gemma3", 2, False, marks=pytest.mark.full),
        pytest.param("gemma3", 2, True, marks=pytest.mark.full),
    ],
)
def test_a_depot_that_comes_later_is_tested_first(fake_lab: Lab, model: str, tp: int, corrupt: bool) -> None:
    """No depot at the start: nothing is loaded from a later one before the self-test has run."""
    run = fake_lab.run(
        model,
        [generate("alone"), RESET, {"do": "control"}, generate("cold"), RESET, generate("warm")],
        tp=tp,
        environment={"KVDEPOT_FAKE_CORRUPT": "1"} if corrupt else {},
        control={"dead": True},
    )
    assert "no depot yet" in run.log
    assert run["alone"]["cached"] == [0, 0, 0]
    assert run["alone"]["tokens"] == run["cold"]["tokens"] == run["warm"]["tokens"]
    assert run["warm"]["cached"] == ([0, 0, 0] if corrupt else hits(True, model))
    assert ("the bytes read back differ from those written" in run.log) == corrupt
    assert ("kvdepot is off" in run.log) == corrupt


def test_hashes_that_mean_nothing_elsewhere_are_refused(fake_lab: Lab) -> None:
    with pytest.raises(pytest.fail.Exception, match="PYTHONHASHSEED"):
        fake_lab.run("llama", [generate("cold")], engine={"prefix_caching_hash_algo": "xxhash"})


def test_limits_of_what_is_loaded(fake_lab: Lab) -> None:
    """``hit_ratio`` limits hits, ``persist_token_threshold`` skips short prompts."""
    options = {"hit_ratio": 0.5, "persist_token_threshold": 330}
    run = fake_lab.run("llama", [generate("cold"), RESET, generate("warm")], options=options)
    assert run["warm"]["cached"] == [288, 160, 0]
    assert run["warm"]["tokens"] == run["cold"]["tokens"]
