"""Lite mode and traces in a real vLLM: the real depot's hits without a depot, and a replay of the recording."""

from pathlib import Path
from typing import Any

from engine_lab import EngineRun, Lab

from kvdepot.traces.files import read_traces

BLOCK = 32
POINT = 0.01
POOL_GB = 0.25
RESET = {"do": "reset"}


def load() -> list[dict[str, Any]]:
    """Continued conversations, prompts with a common beginning, and some that never recur.

    vLLM's own cache is emptied between rounds, as if other requests had filled it.
    """
    phases: list[dict[str, Any]] = []
    for turn in range(3):
        prompts = [[[1, 100], [chat, 100 + 90 * turn]] for chat in range(10, 15)]
        prompts += [[[2, 320]], [[100 + turn, 200]]]
        phases.append(
            {"do": "generate", "name": f"turn {turn}", "prompts": prompts, "max_tokens": 4, "one_by_one": True}
        )
        phases.append(RESET)
    return phases


def lengths() -> list[int]:
    return [sum(part[1] for part in parts) for phase in load() for parts in phase.get("prompts", [])]


def hit_tokens(run: EngineRun) -> float:
    return sum(value for name, value in run["metrics"].items() if name.startswith("vllm:kvdepot_hit_tokens"))


def test_lite_counts_what_the_depot_gives_and_starts_none(real_lab: Lab, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    lite = real_lab.run(
        "llama",
        load(),
        options={
            "use_lite": True,
            "pool_gb": POOL_GB,
            "enable_record_traces": True,
            "trace_directory": str(traces),
        },
    )
    assert not Path(real_lab.socket).exists(), "lite mode has started a depot"
    assert not any((real_lab.root / "blocks").iterdir())
    assert all(lite[f"turn {turn}"]["cached"][1] == 96 for turn in range(3)), "vLLM's own cache works as ever"

    real = real_lab.run("llama", load(), options={"pool_gb": POOL_GB})
    assert [real[f"turn {turn}"]["tokens"] for turn in range(3)] == [
        lite[f"turn {turn}"]["tokens"] for turn in range(3)
    ]
    prompt_tokens = sum(lengths())
    given, counted = hit_tokens(real), lite["metrics"]["vllm:kvdepot_lite_hit_tokens/pool"]
    assert given > 0.2 * prompt_tokens
    assert abs(given - counted) / prompt_tokens < POINT, (given, counted, prompt_tokens)
    assert abs(lite["metrics"]["vllm:kvdepot_lite_ceiling_tokens"] - counted) / prompt_tokens < POINT
    assert "kvdepot lite: " in lite.log
    assert "too little was seen to recommend a size" in lite.log

    # A replay of the recording alone hits as much as vLLM's own cache and the depot together.
    trace, notes = read_traces(map(str, traces.iterdir()))
    requests, references, distinct = trace.counts()
    assert notes == []
    assert requests == len(lengths())
    assert sorted(row[1] for row in trace.requests()) == sorted(lengths())
    assert references == sum(length // BLOCK for length in lengths())
    own = sum(sum(real[f"turn {turn}"]["cached"]) for turn in range(3))  # of both
    # A hit leaves the last token: a lookup of 320 tokens has 9 blocks.
    assert abs((references - distinct) * BLOCK - own) <= 3 * BLOCK
