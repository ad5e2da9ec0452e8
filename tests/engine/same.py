"""What "the same tokens" means for each kind of model.

In float32 a token is the same wherever its context's KV came from. vLLM's latent attention on a CPU can cache prefixes
in bfloat16 only, where batches of other shapes, and hits of other lengths, round differently. There a hit is compared
with vLLM's own hit of the same length, request by request. Where shapes cannot be equal, tokens are compared with the
model's own judgement: how much less likely they are than the best ones.
"""

from typing import Any

from engine_lab import Lab

KINDS = ("llama", "gemma3", "mla")
EXACT = ("llama", "gemma3")
FOREIGN = 1_000_000
REGRET_MAX = 0.015
"""Natural logarithms, averaged over a batch: rounding causes up to 0.005 here, one wrong block 0.04 and more."""


def engine_of(kind: str) -> dict[str, Any]:
    """Returns arguments of the engine that the kind needs."""
    return {} if kind in EXACT else {"dtype": "bfloat16"}


def own_hits(
    lab: Lab, kind: str, prompts: list[Any], cached: list[int], max_tokens: int, ranks: int
) -> list[list[int]]:
    """Returns tokens of an engine without a connector, whose own cache has the given hits, computed in the same
    chunks."""
    phases: list[dict[str, Any]] = []
    for number, (parts, hit) in enumerate(zip(prompts, cached, strict=True)):
        ((seed, count),) = parts
        warm_up = [[seed, hit], [seed + FOREIGN, count - hit]]
        phases.append({"do": "reset"})
        phases.append({"do": "generate", "name": "first", "prompts": [warm_up], "max_tokens": 1})
        phases.append({"do": "generate", "name": str(number), "prompts": [parts], "max_tokens": max_tokens})
    run = lab.run(kind, phases, tp=ranks, connector=None, engine=engine_of(kind))
    found = [run[str(number)] for number in range(len(prompts))]
    assert [result["cached"][0] for result in found] == cached
    return [result["tokens"][0] for result in found]


def assert_likely(lab: Lab, kind: str, prompts: list[Any], *outputs: list[list[int]]) -> None:
    """Checks that tokens are the likeliest in their own context, except for rounding; one wrong block would show."""
    name = "with one wrong block"
    spoilt = [[[seed, 64], [seed + FOREIGN, 32], [seed, count - 96, 96], *more] for (seed, count), *more in prompts]
    wrong = {"do": "generate", "name": name, "prompts": spoilt, "max_tokens": len(outputs[0][0])}
    answers = [*outputs, lab.run(kind, [wrong], connector=None, engine=engine_of(kind))[name]["tokens"]]
    score = [
        {"do": "score", "name": str(number), "prompts": prompts, "tokens": tokens}
        for number, tokens in enumerate(answers)
    ]
    run = lab.run(kind, score, connector=None, engine=engine_of(kind))
    *regrets, regret_of_wrong = [run[str(number)] for number in range(len(answers))]
    print(f"{kind}: regrets {regrets}, {name} {regret_of_wrong}")
    assert regret_of_wrong > REGRET_MAX, "the comparison shows nothing"
    assert max(regrets) < REGRET_MAX


def assert_same(
    lab: Lab, kind: str, prompts: list[Any], found: dict[str, Any], plain: dict[str, Any], ranks: int
) -> None:
    """Checks that ``found``, a phase with one request at a time, has the tokens of an engine without a connector."""
    if kind in EXACT:
        assert found["tokens"] == plain["tokens"]
    else:
        assert found["tokens"] == own_hits(lab, kind, prompts, found["cached"], len(plain["tokens"][0]), ranks)
