"""A model's own judgement of answers: how much less likely their tokens are than the best ones.

For models whose tokens depend on the shapes of batches by rounding: there, equality is too strict, and this is enough.
"""

from typing import Any


def regrets(llm: Any, prompts: list[list[int]], answers: list[list[int]]) -> list[float]:
    """Returns the regret of each answer, in natural logarithms, averaged over its tokens.

    vLLM recomputes everything for this: requests for likelihoods of prompts read no cache.
    """
    from vllm import SamplingParams

    whole = [{"prompt_token_ids": [*tokens, *answer]} for tokens, answer in zip(prompts, answers, strict=True)]
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    outputs = llm.generate(whole, sampling, use_tqdm=False)
    found = []
    for asked, tokens, output in zip(whole, prompts, outputs, strict=True):
        scored = list(zip(asked["prompt_token_ids"], output.prompt_logprobs, strict=True))[len(tokens) :]
        losses = [max(one.logprob for one in likely.values()) - likely[token].logprob for token, likely in scored]
        found.append(sum(losses) / len(losses))
    return found
