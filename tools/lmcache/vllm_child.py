"""Real vLLM on CPU with LMCache's server, in a process of its own: prompts in rounds, each from what the server has.

Run as ``-m tools.lmcache.vllm_child MODEL PORT``. Reads one round a line from standard input, ``{"seed": …, "count": …,
"tokens": …}``, and prints one line of JSON: the answers, and how many tokens of each prompt were found. vLLM's own
prefix cache is off, so what is found is LMCache's.
"""

import json
import os
import random
import sys
import time
from types import MappingProxyType
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    LMCACHE_TRACK_USAGE="false",
    OMP_NUM_THREADS="1",
    VLLM_CPU_NUM_OF_RESERVED_CPU="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
)

ANSWER_TOKENS = 8
VOCABULARY = (4, 2048)


def look_past_libraries() -> None:
    """Works around vLLM 0.32, which looks names up in all objects of all modules: a library of numba has any name."""
    import vllm.triton_utils.dispatcher as dispatcher

    def names(thing: Any) -> Any:
        found = thing.__dict__
        return found if isinstance(found, dict | MappingProxyType) else {}

    dispatcher.vars = names


def engine(model: str, port: str) -> Any:
    """Returns an engine that looks for prefixes in LMCache's server; without a server if ``port`` is 0."""
    from vllm import LLM

    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": int(port)},
    }
    return LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **({"kv_transfer_config": transfer} if port != "0" else {}),
    )


def prompts(seed: int, count: int, tokens: int) -> list[dict[str, list[int]]]:
    """Returns prompts with distinct beginnings."""
    chosen = random.Random(seed)
    return [{"prompt_token_ids": [chosen.randrange(*VOCABULARY) for _ in range(tokens)]} for _ in range(count)]


def main() -> None:
    """Serves rounds until standard input ends."""
    from vllm import SamplingParams

    look_past_libraries()
    llm = engine(sys.argv[1], sys.argv[2])
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False)
    print("READY", flush=True)
    for line in sys.stdin:
        began_s = time.perf_counter()
        outputs = [llm.generate([one], sampling, use_tqdm=False)[0] for one in prompts(**json.loads(line))]
        found = {
            "cached": [output.num_cached_tokens for output in outputs],
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "seconds": time.perf_counter() - began_s,
        }
        print("ROUND", json.dumps(found), flush=True)
    # LMCache's threads do not end on their own.
    os._exit(0)


if __name__ == "__main__":
    main()
