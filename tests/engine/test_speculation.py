"""Speculative decoding by n-grams, with tokens that are scheduled and rejected: hits change no token."""

import pytest
from engine_lab import Lab
from test_vllm import RESET, generate

# Repetitions, so that n-grams are found; an answer long enough to contain ends of blocks.
PROMPTS = [[[1, 100], [1, 100], [1, 130]], [[2, 40], [2, 40], [2, 40], [2, 200]]]
ANSWER_TOKENS = 80
BOTH = ("first", "second")
NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.mark.full
def test_speculated_tokens_change_nothing(lab: Lab) -> None:
    plain = lab.run("llama", [generate("cold", PROMPTS, ANSWER_TOKENS)], connector=None)
    speculating = {"speculative_config": NGRAMS}
    run = lab.run(
        "llama",
        [generate("cold", PROMPTS, ANSWER_TOKENS), RESET, generate("warm", PROMPTS, ANSWER_TOKENS)],
        engine=speculating,
    )
    answers = plain["cold"]["tokens"]
    assert run["cold"]["tokens"] == run["warm"]["tokens"] == answers
    assert run["warm"]["cached"] == [320, 320 - 32]
    assert run["metrics"].get("vllm:spec_decode_num_accepted_tokens", 0) > 0


def test_engines_with_and_without_ngrams_share_what_either_stored(real_lab: Lab) -> None:
    """P8: n-grams have no KV of their own, so both kinds of engines have one namespace."""
    lab, speculating = real_lab, {"speculative_config": NGRAMS}
    first = lab.run("llama", [generate("second", PROMPTS[1:], ANSWER_TOKENS)], engine=speculating)
    plain = lab.run("llama", [generate(name, [one], ANSWER_TOKENS) for name, one in zip(BOTH, PROMPTS, strict=True)])
    again = lab.run("llama", [generate("first", PROMPTS[:1], ANSWER_TOKENS)], engine=speculating)
    assert first["second"]["cached"] == plain["first"]["cached"] == [0]
    assert plain["second"]["cached"] == [320 - 32]
    assert again["first"]["cached"] == [320]
    assert first["second"]["tokens"] == plain["second"]["tokens"]
    assert again["first"]["tokens"] == plain["first"]["tokens"]
    assert first["metrics"].get("vllm:spec_decode_num_accepted_tokens", 0) > 0
