"""LoRA adapters: KV of one that was retrained at the same path is never served (P1)."""

from typing import Any

from engine_lab import Lab
from test_vllm import PROMPTS, RESET, hits

ENGINE = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 4}


def with_adapter(name: str, number: int, path: str) -> dict[str, Any]:
    return {"do": "generate", "name": name, "prompts": PROMPTS, "max_tokens": 12, "adapter": [number, path]}


def train(path: str, seed: int) -> dict[str, Any]:
    return {"do": "train_adapter", "path": path, "seed": seed}


def test_an_adapter_that_was_retrained_in_place_is_another_one(real_lab: Lab) -> None:
    path, *paths = (str(real_lab.root / name) for name in ("adapter", "first", "second", "third"))
    plain_phases = []
    for number, one in enumerate(paths, 1):
        plain_phases += [train(one, number), with_adapter(str(number), number, one)]
    plain = real_lab.run("llama", plain_phases, connector=None, engine=ENGINE)
    assert len({str(plain[str(number)]["tokens"]) for number in (1, 2, 3)}) == 3

    first = real_lab.run("llama", [train(path, 1), with_adapter("cold", 1, path)], engine=ENGINE)
    second = real_lab.run("llama", [with_adapter("warm", 5, path)], engine=ENGINE)
    assert second["warm"]["cached"] == hits(True, "llama")
    third = real_lab.run(
        "llama",
        [
            train(path, 2),
            with_adapter("retrained", 1, path),
            train(path, 3),
            # vLLM's own cache only knows the path.
            RESET,
            with_adapter("retrained while the engine runs", 2, path),
            RESET,
            with_adapter("again", 2, path),
        ],
        engine=ENGINE,
    )
    assert third["retrained"]["cached"] == third["again"]["cached"] == [0, 0, 0]
    assert "its files have changed while the engine runs" in third.log
    fourth = real_lab.run("llama", [with_adapter("restarted", 1, path)], engine=ENGINE)
    assert fourth["restarted"]["cached"] == [0, 0, 0]
    for found, number in (
        (first["cold"], 1),
        (second["warm"], 1),
        (third["retrained"], 2),
        (third["retrained while the engine runs"], 3),
        (third["again"], 3),
        (fourth["restarted"], 3),
    ):
        assert found["tokens"] == plain[str(number)]["tokens"]


def test_of_two_adapters_the_one_that_was_retrained_loses_its_hits_alone(real_lab: Lab) -> None:
    """In one engine that uses both, and in the next one."""
    one, other = (str(real_lab.root / name) for name in ("one", "other"))
    both = {**ENGINE, "max_loras": 2}
    plain = real_lab.run(
        "llama",
        [
            *(train(one, 1), train(other, 2), with_adapter("one", 1, one), with_adapter("other", 2, other)),
            *(train(other, 3), RESET, with_adapter("retrained", 3, other)),
        ],
        connector=None,
        engine=both,
    )
    assert len({str(plain[name]["tokens"]) for name in ("one", "other", "retrained")}) == 3

    first = real_lab.run(
        "llama",
        [
            *(train(one, 1), train(other, 2), with_adapter("one", 1, one), with_adapter("other", 2, other)),
            *(RESET, with_adapter("one again", 1, one), with_adapter("other again", 2, other)),
            # vLLM reads the files of a number that it has not loaded.
            *(train(other, 3), RESET, with_adapter("retrained", 3, other), with_adapter("one beside it", 1, one)),
        ],
        engine=both,
    )
    second = real_lab.run(
        "llama",
        [
            *(with_adapter("one", 1, one), with_adapter("retrained", 2, other)),
            *(RESET, with_adapter("one again", 1, one), with_adapter("retrained again", 2, other)),
        ],
        engine=both,
    )
    found, nothing = hits(True, "llama"), [0, 0, 0]
    expected = {
        "one": nothing,
        "other": nothing,
        "one again": found,
        "other again": found,
        "retrained": nothing,
        "one beside it": found,
    }
    assert {name: first[name]["cached"] for name in expected} == expected
    expected = {"one": found, "retrained": nothing, "one again": found, "retrained again": found}
    assert {name: second[name]["cached"] for name in expected} == expected
    for run, names in ((first, ("one", "one again", "one beside it")), (second, ("one", "one again"))):
        assert all(run[name]["tokens"] == plain["one"]["tokens"] for name in names)
    assert first["other"]["tokens"] == first["other again"]["tokens"] == plain["other"]["tokens"]
    for run in (first, second):
        assert run["retrained"]["tokens"] == plain["retrained"]["tokens"]
    assert second["retrained again"]["tokens"] == plain["retrained"]["tokens"]


def test_what_an_adapter_computes_that_replaced_another_in_place_is_not_stored_as_that_one_s(real_lab: Lab) -> None:
    """Under requests that run. The next engine reads what the first adapter computed, and no more."""
    one, other = (str(real_lab.root / name) for name in ("one", "other"))
    after = 48
    mixed = {**with_adapter("mixed", 1, one), "do": "replace_adapter", "max_tokens": 160, "by": other, "after": after}
    flush = {"do": "generate", "name": "flush", "prompts": PROMPTS[:1], "max_tokens": 2}
    first = real_lab.run("llama", [train(one, 1), train(other, 2), mixed, flush], engine=ENGINE)
    assert "a worker has computed with files that may be others" in first.log
    goes_on = {**with_adapter("goes on", 3, one), "answers": first["mixed"]["tokens"]}
    plain = real_lab.run("llama", [goes_on], connector=None, engine=ENGINE)
    second = real_lab.run("llama", [goes_on], engine=ENGINE)
    lengths = [sum(count for _, count, *_ in parts) for parts in PROMPTS]
    assert any(second["goes on"]["cached"])
    assert all(found <= length + after for found, length in zip(second["goes on"]["cached"], lengths, strict=True))
    assert second["goes on"]["tokens"] == plain["goes on"]["tokens"]
