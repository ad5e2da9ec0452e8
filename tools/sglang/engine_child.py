"""Real SGLang on CPU, in a separate process: prompts in rounds, and flushes of its own caches.

Run as ``-m tools.sglang.engine_child MODEL ARGUMENTS``, the latter a JSON object of SGLang's. Reads one round per line
from standard input, ``{"seed": …, "count": …, "tokens": …, "answer_tokens": …}`` or ``{"flush": true}``, and prints one
line of JSON: the answers, the seconds until the first token of each, and how many tokens of each prompt came from
where.
"""

import json
import os
import random
import sys
import time
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", SGLANG_USE_CPU_ENGINE="1")

ANSWER_TOKENS = 8
VOCABULARY = (4, 2048)
ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "page_size": 32,
    "max_total_tokens": 16384,
    "chunked_prefill_size": 2048,
    "mem_fraction_static": 0.5,
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
    "random_seed": 1,
    "log_level": "info",
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
}


def prompts(seed: int, count: int, tokens: int) -> list[list[int]]:
    """Returns prompts with distinct beginnings."""
    chosen = random.Random(seed)
    return [[chosen.randrange(*VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def answer(engine: Any, asked: dict[str, Any], found_in: str) -> dict[str, Any]:
    """Returns the answer to one line of standard input; SGLang counts hits of the depot under ``found_in``."""
    if asked.get("flush"):
        found = engine.flush_cache()
        return {"flushed": bool(getattr(found, "success", found))}
    sampling = {"temperature": 0, "max_new_tokens": asked.pop("answer_tokens", ANSWER_TOKENS), "ignore_eos": True}
    outputs, first_s = [], []
    for one in prompts(**asked):
        began_s = time.perf_counter()
        parts = engine.generate(input_ids=one, sampling_params=sampling, stream=True)
        outputs.append(next(parts))
        first_s.append(time.perf_counter() - began_s)
        # Each part repeats the tokens before it.
        outputs[-1] = (outputs[-1:] + list(parts))[-1]
    metas = [one["meta_info"] for one in outputs]
    details = [meta.get("cached_tokens_details") or {} for meta in metas]
    return {
        "tokens": [one["output_ids"] for one in outputs],
        "cached": [meta["cached_tokens"] for meta in metas],
        "from_host": [one.get("host", 0) for one in details],
        "from_depot": [one.get(found_in, 0) for one in details],
        "first_s": first_s,
    }


def main() -> None:
    """Serves rounds until standard input ends."""
    # SGLang also writes to standard output.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import sglang

    arguments = {**ARGUMENTS, **json.loads(sys.argv[2])}
    engine = sglang.Engine(model_path=sys.argv[1], **arguments)
    # SGLang counts what a linker loads as hits of the host's memory.
    found_in = "storage" if arguments["enable_hierarchical_cache"] else "host"
    print("READY", file=replies, flush=True)
    for line in sys.stdin:
        print("ROUND", json.dumps(answer(engine, json.loads(line), found_in)), file=replies, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
