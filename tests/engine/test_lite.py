"""Lite mode and traces in a real vLLM: the real depot's hits without a depot, and a replay of the recording."""

import random
from pathlib import Path
from typing import Any

from engine_lab import EngineRun, Lab

from kvdepot.traces.files import read_traces
from tools.lab.depot import depot_stats

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


SMALL_POOL_GB = 0.0625
DOCUMENTS, DOCUMENT_TOKENS, QUESTIONS = 60, 640, 160


def long_load(settle: str | None) -> list[dict[str, Any]]:
    """Questions about documents, some of them popular: more blocks than the pool holds, one request at a time.

    Args:
        settle: the depot's socket; it has a request's blocks before the next request comes, as lite mode assumes.
    """
    chosen = random.Random(3)
    popularity = [1 / (3 + number) for number in range(DOCUMENTS)]
    documents = chosen.choices(range(DOCUMENTS), popularity, k=QUESTIONS)
    prompts = [
        [[1000 + document, DOCUMENT_TOKENS], [2000 + number, chosen.randrange(32, 128)]]
        for number, document in enumerate(documents)
    ]
    whole = {"do": "generate", "name": "questions", "prompts": prompts, "max_tokens": 1, "one_by_one": True}
    return [whole if settle is None else {**whole, "settle": settle}]


def test_lite_counts_what_a_depot_gives_that_is_too_small_for_the_load(real_lab: Lab) -> None:
    """Evictions decide what is hit, in the depot and in its simulation."""
    options = {"pool_gb": SMALL_POOL_GB, "pipeline": "Cache", "directories": None}
    engine = {"enable_prefix_caching": False}
    lite = real_lab.run("llama", long_load(None), options={**options, "use_lite": True}, engine=engine)
    real = real_lab.run("llama", long_load(real_lab.socket), options=options, engine=engine)
    assert real["questions"]["tokens"] == lite["questions"]["tokens"]
    evicted = (depot_stats(Path(real_lab.socket)) or {})["evict_blocks"]
    prompt_tokens = sum(part[1] for parts in long_load(None)[0]["prompts"] for part in parts)
    given, counted = hit_tokens(real), lite["metrics"]["vllm:kvdepot_lite_hit_tokens/pool"]
    ceiling = lite["metrics"]["vllm:kvdepot_lite_ceiling_tokens"]
    print(f"{prompt_tokens} prompt tokens: {given} hit, {counted} counted, {ceiling} at most; {evicted} blocks evicted")
    assert evicted > 0
    assert ceiling - given > 5 * POINT * prompt_tokens, "the pool is too large to show anything"
    assert given > 0.2 * prompt_tokens
    assert abs(given - counted) / prompt_tokens < POINT, (given, counted, prompt_tokens)
    larger = [lite["metrics"][f"vllm:kvdepot_lite_hit_tokens/{size}"] for size in ("pool", "double", "fourfold")]
    assert larger == sorted(larger)
    assert larger[-1] > counted
    (advice,) = (line for line in lite.log.splitlines() if "kvdepot lite: recommended: a depot of " in line)
    assert "which saves computing" in advice
