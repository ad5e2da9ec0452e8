"""Pooling models: a hit must not take tokens away from a pooler that needs all of them, and changes no embedding."""

from typing import Any

import pytest
from engine_lab import Lab
from test_vllm import RESET

PROMPTS = [[[1, 230]], [[2, 200]], [[3, 150]]]
LONGER = [[[1, 230], [7, 40]]]
# Whole blocks of 32 tokens.
HITS = [224, 192, 128]
NEAR = 1e-4
"""Embeddings have length 1; float32 rounds batches of other shapes differently."""


def embed(name: str, prompts: list[Any] = PROMPTS) -> dict[str, Any]:
    return {"do": "embed", "name": name, "prompts": prompts}


def pooled_by(kind: str) -> dict[str, Any]:
    """Returns an engine's options: the embedding is made of the last token, or is the mean of all."""
    return {"runner": "pooling", "convert": "embed", "pooler_config": {"seq_pooling_type": kind}}


def near(first: list[list[float]], second: list[list[float]]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(abs(a - b) < NEAR for one, other in pairs for a, b in zip(one, other, strict=True))


def test_an_embedding_of_the_last_token_is_the_same_after_a_hit(real_lab: Lab) -> None:
    engine = pooled_by("LAST")
    plain = real_lab.run("llama", [embed("cold"), embed("longer", LONGER)], engine=engine, connector=None)
    run = real_lab.run("llama", [embed("cold"), RESET, embed("warm")], engine=engine)
    again = real_lab.run("llama", [embed("restarted"), embed("longer", LONGER)], engine=engine)
    assert run["cold"]["cached"] == [0, 0, 0]
    assert run["warm"]["cached"] == again["restarted"]["cached"] == HITS
    assert again["longer"]["cached"] == [224]
    for found in (run["cold"], run["warm"], again["restarted"]):
        assert near(found["embeddings"], plain["cold"]["embeddings"])
    assert near(again["longer"]["embeddings"], plain["longer"]["embeddings"])
    assert not near(plain["cold"]["embeddings"][:1], plain["longer"]["embeddings"]), "they tell prompts apart"


@pytest.mark.parametrize("kind", ["MEAN", pytest.param("CLS", marks=pytest.mark.full)])
def test_the_connector_is_off_for_an_embedding_of_all_tokens(real_lab: Lab, kind: str) -> None:
    """vLLM fails when a part of such a prompt comes from a cache."""
    engine = {**pooled_by(kind), "max_num_batched_tokens": 2048}
    plain = real_lab.run("llama", [embed("cold")], engine=engine, connector=None)
    run = real_lab.run("llama", [embed("cold"), embed("again")], engine=engine)
    assert "this model pools over all tokens of a prompt" in run.log
    assert run["cold"]["cached"] == run["again"]["cached"] == [0, 0, 0]
    for found in (run["cold"], run["again"]):
        assert near(found["embeddings"], plain["cold"]["embeddings"])
