"""An engine that obeys orders from a socket until it is killed; forked by ``tools.lab.warm``."""

from multiprocessing.connection import Client
from typing import Any

from tools.lab.regret import regrets

RESET_TRIES = 50


def main(plan: dict[str, Any]) -> None:
    """``plan``: ``address`` to connect to, ``engine`` arguments of vLLM. Ends when the peer disconnects.

    An order is ``{"prompts": []}``, which is answered, or ``{"prompts": [], "answers": []}``, which returns the model's
    judgement of these answers.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(**plan["engine"])
    connection = Client(plan["address"], "AF_UNIX")
    connection.send("ready")
    sampling = SamplingParams(temperature=0, max_tokens=plan["answer_tokens"], ignore_eos=True)
    while True:
        try:
            order = connection.recv()
        except EOFError:
            return
        prompts: list[list[int]] = order["prompts"]
        if "answers" in order:
            connection.send({"regrets": regrets(llm, prompts, order["answers"])})
            continue
        # The depot is never asked for what vLLM itself still has.
        if not any(llm.reset_prefix_cache() for _ in range(RESET_TRIES)):
            raise RuntimeError("vLLM did not reset its prefix cache between batches")
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False)
        connection.send(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
            }
        )
