"""`make bench-concurrency`: its prompts, and its figures from what engines answered."""

import pytest

from benches.engine.concurrency import HIT, OWN, PLAIN, POOL, prompts_of, steps_of, summary
from benches.engine.runs import Result, Sent, settle


def answered(took_s: float, ttft_ms: float, output: int = 7) -> Sent:
    """Two requests, sent together twice."""
    return Sent((ttft_ms,) * 3 + (2 * ttft_ms,), (64,) * 4, ((output,),) * 4, (took_s, took_s))


def test_prompts_share_their_first_part_and_one_token_is_computed():
    one, other = prompts_of(2, 64, 0.25)
    assert one[:2] == other[:2] == (one[0], 16)
    assert one[2] != other[2]
    assert one[3] == other[3] == 49


def test_a_connector_s_hits_come_after_vllm_has_forgotten_its_own():
    class Arguments:
        tokens, answer_tokens, repeats = 64, 2, 2

    steps = steps_of(prompts_of(2, 64, 0.5), settle(), Arguments)
    names = [step.get("name", step["do"]) for step in steps]
    assert names == ["warm-up", "forget", "fill", "warm-up", *[OWN, "settle", "forget", HIT] * 2]
    assert "forget" not in [step["do"] for step in steps_of(prompts_of(2, 64, 0.5), None, Arguments)][2:]


def test_ratios_are_within_a_round():
    rounds = [
        {
            PLAIN: Result({OWN: answered(1.0, 10.0)}, ()),
            POOL: Result({OWN: answered(1.0, 10.0), HIT: answered(2.0, 20.0)}, ()),
        },
        {
            PLAIN: Result({OWN: answered(10.0, 100.0)}, ()),
            POOL: Result({OWN: answered(10.0, 100.0), HIT: answered(10.0, 100.0, output=8)}, ()),
        },
    ]
    rows = summary(rounds, requests=2)
    hit = rows["kvdepot, from the pool"]
    assert (hit["of_own"], hit["of_own_range"]) == (0.75, (0.5, 1.0))
    assert hit["requests_per_second"] == pytest.approx((1.0 + 0.2) / 2)
    assert hit["same_output"] is False
    assert hit["ttft_p99_ms"] == pytest.approx(200.0, rel=0.1)
    assert rows["vLLM's own prefix cache"]["of_own"] == 1.0
    assert rows["vLLM's own prefix cache"]["same_output"] is True
    assert not any("offloading" in title for title in rows)
