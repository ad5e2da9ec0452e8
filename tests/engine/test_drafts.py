"""Drafts with KV of their own, in real vLLM: which of it is stored, and where a hit ends; hits change no token."""

from typing import Any

import pytest
from engine_lab import Lab
from test_vllm import RESET, ROUNDING, generate

PROMPTS = [[[1, 320]], [[2, 350]]]
"""The first one ends with a block."""
OTHERS = [[[1, 320], [7, 90]], [[2, 350], [8, 60]]]
"""Begin alike and go on otherwise: KV that a draft computed from the next token is another one."""
KINDS = {
    # Model, method, draft, tokens guessed, hits. With EAGLE and MTP a hit ends a block before the last one that is
    # stored: the first prompt's last block was stored with its answer, so it costs nothing there.
    "eagle": ("llama", "eagle", "eagle", 3, [288, 288]),
    "mtp": ("mimo", "mtp", None, 1, [288, 288]),
    # The same model: all of its guesses are right.
    "draft_model": ("llama", "draft_model", "llama", 3, [288, 320]),
}
LATER = [pytest.param("mtp", marks=pytest.mark.full), pytest.param("draft_model", marks=pytest.mark.full)]
ANSWER_TOKENS = 40


def speculating(lab: Lab, kind: str) -> dict[str, Any]:
    _, method, draft, tokens, _ = KINDS[kind]
    own = {"method": method, "num_speculative_tokens": tokens}
    return {"speculative_config": {**own, "model": lab.model(draft)} if draft else own}


@pytest.mark.parametrize("kind", ["eagle", *LATER])
def test_same_tokens_cold_warm_and_after_a_restart(real_lab: Lab, kind: str) -> None:
    lab, engine, (model, *_, found) = real_lab, speculating(real_lab, kind), KINDS[kind]
    cold, others = generate("cold", PROMPTS, ANSWER_TOKENS), generate("others", OTHERS, ANSWER_TOKENS)
    plain = lab.run(model, [cold, others], connector=None)
    first = lab.run(model, [cold, RESET, generate("warm", PROMPTS, ANSWER_TOKENS)], engine=engine)
    second = lab.run(model, [generate("restarted", PROMPTS, ANSWER_TOKENS), RESET, others], engine=engine)
    assert first["cold"]["cached"] == [0, 0]
    assert first["warm"]["cached"] == second["restarted"]["cached"] == found
    assert min(second["others"]["cached"]) >= 288
    for phase in (first["cold"], first["warm"], second["restarted"]):
        assert phase["tokens"] == plain["cold"]["tokens"]
    assert second["others"]["tokens"] == plain["others"]["tokens"]
    assert first["metrics"].get("vllm:spec_decode_num_drafts", 0) > 0


@pytest.mark.parametrize("kind", ["eagle", *LATER])
def test_nothing_of_a_rejected_guess_is_stored(fake_lab: Lab, kind: str) -> None:
    """KV stored of an answer, with guesses that were rejected, is that of the same tokens as a prompt (P1).

    The stand-in compares a block's bytes with those that were stored of it before.
    """
    again = generate("as a prompt", PROMPTS, 8)
    again |= {"answers_of": "answered", "kv_transfer_params": {"kvdepot.no_load": True}}
    phases = [generate("answered", PROMPTS, 100), RESET, again]
    # Prompts are computed whole: after a part of one, vLLM's first runner takes the prompt's last token for the next.
    engine = {**speculating(fake_lab, kind), "max_num_batched_tokens": 2048}
    run = fake_lab.run(KINDS[kind][0], phases, engine=engine)
    assert run["as a prompt"]["cached"] == [0, 0]
    assert run["metrics"].get("vllm:spec_decode_num_drafts", 0) > 0
    assert max(fake_lab.conflicts(), default=0.0) < ROUNDING
