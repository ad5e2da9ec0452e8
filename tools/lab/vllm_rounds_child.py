"""Real vLLM on CPU with a connector, in a process of its own: prompts in rounds, and flushes of its own cache.

Run as ``-m tools.lab.vllm_rounds_child MODEL TRANSFER``, the latter a JSON object of vLLM's. Reads one round a line
from standard input, ``{"seed": …, "count": …, "tokens": …}`` or ``{"flush": true}``, and prints one line of JSON: the
answers, and how many tokens of each prompt were found.
"""

import json
import os
import random
import sys
import time
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_NUM_OF_RESERVED_CPU="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
)

ANSWER_TOKENS = 8
VOCABULARY = (4, 2048)


def answer(llm: Any, sampling: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """What one line of standard input asks for."""
    if asked.get("flush"):
        return {"flushed": bool(llm.reset_prefix_cache())}
    chosen = random.Random(asked["seed"])
    prompts = [[chosen.randrange(*VOCABULARY) for _ in range(asked["tokens"])] for _ in range(asked["count"])]
    began_s = time.perf_counter()
    outputs = [llm.generate([{"prompt_token_ids": one}], sampling, use_tqdm=False)[0] for one in prompts]
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "seconds": time.perf_counter() - began_s,
    }


def main() -> None:
    """Serves rounds until standard input ends."""
    # vLLM writes to standard output, too.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        kv_transfer_config=json.loads(sys.argv[2]),
    )
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False)
    print("READY", file=replies, flush=True)
    for line in sys.stdin:
        print("ROUND", json.dumps(answer(llm, sampling, json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
