"""Runs one engine in this process through a list of phases and prints what came out as one line of JSON.

``runner.py scenario.json``; the scenario is ``{"engine": {...}, "connector": {...} | null, "control": path, "phases": [...]}``.
A phase is ``{"do": "generate", "name": ..., "prompts": [[seed, tokens], ...], "max_tokens": n}``, ``{"do": "reset"}`` (vLLM's own
cache), ``{"do": "reset_all"}``, ``{"do": "control", ...}`` (writes the fake depot's control file), ``{"do": "sleep"}``,
``{"do": "settle", "socket": ...}`` (all dumps are in files), ``{"do": "kill_depot", "socket": ...}`` (kill -9).
"""

import faulthandler
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")


def prompt(seed: int, tokens: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(4, 2048) for _ in range(tokens)]


def with_depot(socket: str, use: Callable[[Any], Any]) -> Any:
    """Asks the engine's depot something on an attachment of its own."""
    from kvdepot import _native

    depot = _native.Depot.connect(socket, None, wait_ms=30_000, call_timeout_ms=30_000)
    try:
        return use(depot)
    finally:
        depot.close()


def main() -> None:
    faulthandler.enable()
    from vllm import LLM, SamplingParams

    with open(sys.argv[1], encoding="utf-8") as file:
        scenario: dict[str, Any] = json.load(file)
    options: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 2048,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
        "disable_log_stats": False,
        **scenario["engine"],
    }
    if scenario.get("connector") is not None:
        options["kv_transfer_config"] = scenario["connector"]
    started = time.monotonic()
    llm = LLM(**options)
    results: dict[str, Any] = {"start_s": round(time.monotonic() - started, 1)}
    for phase in scenario["phases"]:
        do = phase["do"]
        if do == "generate":
            began = time.monotonic()
            prompts = [{"prompt_token_ids": sum((prompt(s, n) for s, n in parts), [])} for parts in phase["prompts"]]
            sampling = SamplingParams(temperature=0, max_tokens=phase.get("max_tokens", 8), ignore_eos=True)
            batches = [[one] for one in prompts] if phase.get("one_by_one") else [prompts]
            outputs = [out for batch in batches for out in llm.generate(batch, sampling, use_tqdm=False)]
            results[phase["name"]] = {
                "seconds": round(time.monotonic() - began, 3),
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "finish": [output.outputs[0].finish_reason for output in outputs],
            }
        elif do == "reset":
            for _ in range(50):
                if llm.reset_prefix_cache():
                    break
                time.sleep(0.05)
        elif do == "reset_all":
            results["reset_all"] = llm.llm_engine.reset_prefix_cache(reset_connector=True)
        elif do == "control":
            values = {key: value for key, value in phase.items() if key != "do"}
            with open(scenario["control"] + ".new", "w", encoding="utf-8") as file:
                json.dump(values, file)
            os.replace(scenario["control"] + ".new", scenario["control"])
        elif do == "sleep":
            time.sleep(phase["s"])
        elif do == "settle":
            with_depot(phase["socket"], lambda depot: depot.drain(60_000))
        elif do == "kill_depot":
            stats = with_depot(phase["socket"], lambda depot: json.loads(depot.stats_json()))
            os.kill(stats["depot"]["pid"], signal.SIGKILL)
    names = ("vllm:num_preemptions", "vllm:external_prefix_cache_hits", "vllm:prompt_tokens_cached_by_source")
    results["metrics"] = {}
    for metric in llm.get_metrics():
        if metric.name in names and getattr(metric, "value", 0):
            source = metric.labels.get("source", "")
            results["metrics"][metric.name + ("/" + source if source else "")] = metric.value
    print("RESULT " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
