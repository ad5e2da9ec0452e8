"""What a model itself thinks of answers: how much less likely their tokens are than the best ones.

For models whose tokens depend on the shapes of batches by rounding: then equal tokens prove too much, and this enough.
"""

from typing import Any


def regrets(llm: Any, prompts: list[list[int]], answers: list[list[int]]) -> list[float]:
    """Of each answer, in natural logarithms, on the average of its tokens.

    vLLM computes all anew for this: requests that ask for likelihoods of prompts read no cache.
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
