"""Prompts with images, and prompts of embeddings: each finds its own blocks, and none finds another one's (P1)."""

from typing import Any

import pytest
from engine_lab import Lab
from test_vllm import RESET, generate

# 40 tokens, an image of 16, 200 tokens: 8 blocks of 32, of which the first has no part of the image.
TEXT = [[5, 240]]


def seen(name: str, image: int) -> dict[str, Any]:
    return {**generate(name, [TEXT], 12), "images": [image]}


@pytest.mark.full
def test_images_find_their_own_blocks_only(previous: Lab) -> None:
    """The environment of the previous release has torchvision, which vLLM's models with images import."""
    engine = {"limit_mm_per_prompt": {"image": 1}}
    options = {"use_layerwise": False}
    plain = previous.run("llava", [seen("first", 1), RESET, seen("second", 2)], engine=engine, connector=None)
    assert plain["first"]["tokens"] != plain["second"]["tokens"], "the model does not look at images"
    phases = [seen("first", 1), RESET, seen("second", 2), RESET, seen("first again", 1), RESET, seen("second again", 2)]
    run = previous.run("llava", phases, engine=engine, options=options)
    later = previous.run("llava", [seen("first", 1), RESET, seen("third", 3)], engine=engine, options=options)
    for found in (run["first"], run["first again"], later["first"]):
        assert found["tokens"] == plain["first"]["tokens"]
    for found in (run["second"], run["second again"]):
        assert found["tokens"] == plain["second"]["tokens"]
    assert [run[name]["cached"] for name in ("first", "second", "first again", "second again")] == [
        [0],
        [32],
        [256],
        [256],
    ]
    assert (later["first"]["cached"], later["third"]["cached"]) == ([256], [32])


def test_prompts_of_embeddings_find_their_own_blocks_only(real_lab: Lab) -> None:
    """A prompt that shares the first 160 rows with another one shares five blocks with it, and no tokens exist."""
    engine = {"enable_prompt_embeds": True}
    options = {"use_layerwise": False}
    one, other, longer = [[1, 160], [2, 150]], [[3, 160], [2, 150]], [[1, 160], [4, 100]]

    def asked(name: str, prompt: list[list[int]]) -> dict[str, Any]:
        return {**generate(name, [prompt], 12), "embeddings": True}

    phases = [
        asked("one", one),
        RESET,
        asked("other", other),
        RESET,
        asked("again", one),
        RESET,
        asked("longer", longer),
    ]
    first = real_lab.run("llama", phases, engine=engine, options=options)
    second = real_lab.run("llama", [asked("one", one), RESET, asked("longer", longer)], engine=engine, options=options)
    assert first["one"]["tokens"] != first["other"]["tokens"]
    assert [first[name]["cached"] for name in ("one", "other", "again", "longer")] == [[0], [0], [288], [160]]
    assert [second[name]["cached"] for name in ("one", "longer")] == [[288], [256]]
    assert first["again"]["tokens"] == second["one"]["tokens"] == first["one"]["tokens"]
    assert second["longer"]["tokens"] == first["longer"]["tokens"]
