"""Real vLLM on CPU with LMCache's server, in a process of its own: prompts in rounds, each from what the server has.

Run as ``-m tools.lmcache.vllm_child MODEL PORT ARGUMENTS``, the last a JSON object of arguments of ``vllm.LLM``. Reads
one round a line from standard input, ``{"seed": …, "count": …, "tokens": …}`` or ``{"flush": true}``, and prints one
line of JSON: the answers, how many tokens of each prompt were found, and the seconds to each first token if vLLM keeps
statistics. By default vLLM's own prefix cache is off, so what is found is LMCache's.
"""

import json
import os
import random
import sys
import time
from typing import Any

from tools.lmcache.connector import look_past_libraries, transfer

ANSWER_TOKENS = 8
VOCABULARY = (4, 2048)
FLUSH_S = 60.0


def engine(model: str, port: int, arguments: dict[str, Any]) -> Any:
    """Returns an engine that looks for prefixes in LMCache's server; without a server if ``port`` is 0."""
    from vllm import LLM

    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 4,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    connected = {"kv_transfer_config": transfer(port)} if port else {}
    return LLM(model=model, **{**defaults, **connected, **arguments})


def prompts(seed: int, count: int, tokens: int) -> list[dict[str, list[int]]]:
    """Returns prompts with distinct beginnings."""
    chosen = random.Random(seed)
    return [{"prompt_token_ids": [chosen.randrange(*VOCABULARY) for _ in range(tokens)]} for _ in range(count)]


def flush(llm: Any) -> bool:
    """Empties vLLM's own prefix cache. Returns whether that worked in time.

    LMCache keeps a request's blocks until they are stored, and vLLM learns that they are in its next step.
    """
    end_s = time.monotonic() + FLUSH_S
    while not llm.reset_prefix_cache():
        if time.monotonic() > end_s:
            return False
        llm.llm_engine.step()
    return True


def answer(llm: Any, sampling: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """What one line of standard input asks for."""
    if asked.get("flush"):
        return {"flushed": flush(llm)}
    began_s = time.perf_counter()
    outputs = [llm.generate([one], sampling, use_tqdm=False)[0] for one in prompts(**asked)]
    return {
        "cached": [output.num_cached_tokens for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "first_s": [output.metrics.first_token_latency for output in outputs if output.metrics],
        "seconds": time.perf_counter() - began_s,
    }


def main() -> None:
    """Serves rounds until standard input ends."""
    from vllm import SamplingParams

    look_past_libraries()
    llm = engine(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False)
    print("READY", flush=True)
    for line in sys.stdin:
        print("ROUND", json.dumps(answer(llm, sampling, json.loads(line))), flush=True)
    # LMCache's threads do not end on their own.
    os._exit(0)


if __name__ == "__main__":
    main()
