"""Runs one engine in this process through a list of phases and prints what came out as one line of JSON.

``runner.py scenario.json``; a scenario is ``{"engine": {}, "connector": {} | null, "control": path, "phases": []}``.
A phase names what it does in ``do``, a method of ``Run``:

- ``generate``: ``name``, ``prompts`` (each a list of parts, see ``prompt``), ``max_tokens``, ``one_by_one``,
  ``settle`` (the depot's socket: what a batch dumped is in files before the next batch), ``until_cached`` (again
  until the first prompt had that hit: an answer that is late is a miss), ``adapter``
  (number and path), ``kv_transfer_params``, ``cache_salt``, ``images`` (a seed for each prompt), ``embeddings`` (the
  prompts are embeddings and not tokens), ``answers_of`` (each prompt goes on with its answer in that phase),
  ``answers`` (or with these)
- ``replace_adapter``: as ``generate``; when the first prompt has ``after`` tokens of its answer, the adapter at path
  ``by`` replaces its adapter in place
- ``embed``: ``name``, ``prompts``, of a pooling model: ``embeddings`` and ``cached``
- ``train_adapter``: a LoRA adapter of ``seed`` is written to ``path``
- ``score``: ``name``, ``prompts``, ``tokens`` (the answers): by how much their tokens are less likely than the best
  ones, in logarithms, on the average
- ``reset`` (vLLM's own cache, when all dumps have ended), ``reset_all`` (the depot's, too)
- ``control``: the rest is written to the fake depot's control file
- ``settle`` (all dumps are in files), ``kill_depot`` (kill -9): ``socket``
- ``upgrade``: ``command`` is started, and ``prompts`` go on, with a new one in each round (``fresh``), until the depot
  at ``socket`` is that process; ``name`` gets the rounds
- ``attached``: the engine's connectors have a depot (again)
- ``sibling``: what the connector of `sibling.py` does from now on: ``mode``
- ``sleep``: ``s``
- ``offloaded``: vLLM's own offloading has stored all in its secondary tiers; ``forget_offloaded``: and its memory is
  emptied, as is its own cache
- ``tier_attached``: the secondary tier has a depot, or with ``no`` none; ``tier_counts``: ``name`` gets its counts
- ``touch`` and ``wait_for``: ``file``, for engines that run at the same time
- ``step_until``: the engine computes ``prompts`` again and again until ``file`` exists
- ``update_weights``: every parameter is changed in place, in each rank's memory, by the same rule for one ``seed``
- ``reload_weights``: vLLM's own, from the files of ``model``, or of the engine's own model without it
- ``pause`` (aborts requests, clears all caches) and ``resume``: vLLM's own, for an update of the weights
- ``nap``: vLLM's sleep mode, down to ``level`` and up again
"""

import faulthandler
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")

ATTACHED_S = 120
OTHER_ENGINE_S = 240
SETTLE_S = 120
DUMPS_S = 60
UPGRADE_S = 120
STEPS_S = 240
TRIES = 30
METRICS = (
    "vllm:num_preemptions",
    "vllm:external_prefix_cache_hits",
    "vllm:prompt_tokens_cached_by_source",
    "vllm:kvdepot_dump_failed_blocks",
    "vllm:kvdepot_hit_tokens",
    "vllm:kvdepot_lite_asked_tokens",
    "vllm:kvdepot_lite_ceiling_tokens",
    "vllm:kvdepot_lite_hit_tokens",
    "vllm:kvdepot_load_blocks",
    "vllm:kvdepot_misses",
    "vllm:kvdepot_params_malformed",
    "vllm:kvdepot_offload_attached",
    "vllm:kvdepot_offload_loaded_chunks",
    "vllm:kvdepot_offload_missed_chunks",
    "vllm:kvdepot_offload_stored_chunks",
    "vllm:kvdepot_params_unknown",
    "vllm:kvdepot_shared_load_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_drafts",
)
LABELS = ("source", "reason", "size", "kind")
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 2048,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 4,
    "disable_log_stats": False,
}


def prompt(parts: list[list[int]]) -> dict[str, list[int]]:
    """Returns the tokens of a prompt made of parts: ``count`` tokens of a seed's row, from the front or from
    ``begin``."""
    tokens: list[int] = []
    for seed, count, *begin in parts:
        chosen = random.Random(seed)
        row = [chosen.randrange(4, 2048) for _ in range(sum(begin) + count)]
        tokens += row[sum(begin) :]
    return {"prompt_token_ids": tokens}


def with_image(one: dict[str, Any], seed: int) -> dict[str, Any]:
    """Puts an image between the first 40 tokens of a prompt and the rest; the image token is the model's last one."""
    import numpy as np
    from PIL import Image

    pixels = np.random.RandomState(seed).randint(0, 255, (56, 56, 3), dtype=np.uint8)
    tokens = [min(token, 2046) for token in one["prompt_token_ids"]]
    tokens[40:40] = [2047]
    return {**one, "prompt_token_ids": tokens, "multi_modal_data": {"image": Image.fromarray(pixels)}}


def as_embeddings(parts: list[list[int]], width: int) -> dict[str, Any]:
    """Returns a prompt of embeddings: ``count`` rows of a seed for each part."""
    import torch

    rows = [torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 0.06 for seed, count in parts]
    return {"prompt_embeds": torch.cat(rows)}


def settle(socket: str) -> None:
    """Waits until the tiers have everything that was dumped."""
    from tools.lab.depot import wait_until_clean

    wait_until_clean(Path(socket), SETTLE_S)


def with_depot(socket: str, use: Callable[[Any], Any]) -> Any:
    """Queries the engine's depot through a separate attachment."""
    from kvdepot import _native

    depot = _native.Depot.connect(socket, None, wait_ms=30_000, call_timeout_ms=30_000)
    try:
        return use(depot)
    finally:
        depot.close()


def depot_connector(connector: Any) -> Any:
    """Returns the depot's connector: this one, or the one below a `MultiConnector`."""
    return next(
        one for one in getattr(connector, "sub_connectors", [connector]) if type(one).__name__ == "KVDepotConnector"
    )


def worker_attached(worker: Any) -> bool:
    """Returns whether this rank's connector has a depot."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return bool(depot_connector(get_kv_transfer_group())._worker._depot.attached)


def change_weights(worker: Any, seed: int) -> None:
    """Changes the model in this rank's memory, as a trainer that sends new weights does."""
    import torch

    for name, parameter in worker.get_model().named_parameters():
        generator = torch.Generator().manual_seed(hash_of(f"{seed}/{name}"))
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.data.add_((noise * 0.5 * parameter.data.float().std(correction=0)).to(parameter.dtype))


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def adapter_of(phase: dict[str, Any]) -> Any:
    if "adapter" not in phase:
        return None
    from vllm.lora.request import LoRARequest

    number, path = phase["adapter"]
    return LoRARequest(os.path.basename(path), number, path)


def write_adapter(path: str, seed: int, config: Any) -> None:
    """Creates an adapter that changes queries and values of every layer."""
    import torch
    from safetensors.torch import save_file

    rank, generator = 8, torch.Generator().manual_seed(seed)
    rows = {"q_proj": config.num_attention_heads, "v_proj": config.num_key_value_heads}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, heads in rows.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, config.hidden_size, generator=generator)
            tensors[f"{key}.lora_B.weight"] = torch.randn(heads * config.head_dim, rank, generator=generator)
    os.makedirs(path, exist_ok=True)
    save_file(tensors, os.path.join(path, "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*rows], "bias": "none"}
    with open(os.path.join(path, "adapter_config.json"), "w", encoding="utf-8") as file:
        json.dump(settings, file)


def scheduler_attached(llm: Any) -> bool:
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    return bool(depot_connector(connector)._scheduler._depot.attached)


def offloading(llm: Any) -> Any:
    """The manager of vLLM's own offloading."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager


class Run:
    """One engine and the results of its phases so far."""

    def __init__(self, llm: Any, control: str, socket: str | None) -> None:
        self.llm, self.control_file, self.socket = llm, control, socket
        self.results: dict[str, Any] = {}

    def generate(self, phase: dict[str, Any]) -> None:
        from vllm import SamplingParams

        salt = {"cache_salt": phase["cache_salt"]} if "cache_salt" in phase else {}
        prompts: list[dict[str, Any]] = [{**prompt(parts), **salt} for parts in phase["prompts"]]
        if "images" in phase:
            prompts = [with_image(one, seed) for one, seed in zip(prompts, phase["images"], strict=True)]
        if phase.get("embeddings"):
            width = self.llm.llm_engine.model_config.get_hidden_size()
            prompts = [as_embeddings(parts, width) for parts in phase["prompts"]]
        answers = phase.get("answers") or self.results.get(phase.get("answers_of"), {}).get("tokens", ())
        for one, answer in zip(prompts, answers, strict=False):
            one["prompt_token_ids"] += answer
        params = phase.get("kv_transfer_params")
        sampling = SamplingParams(
            temperature=0,
            max_tokens=phase.get("max_tokens", 8),
            ignore_eos=True,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        adapter = adapter_of(phase)
        batches = [[one] for one in prompts] if phase.get("one_by_one") else [prompts]
        began = time.monotonic()
        for _ in range(TRIES):
            outputs = []
            for batch in batches:
                outputs += self.llm.generate(batch, sampling, use_tqdm=False, lora_request=adapter)
                if "settle" in phase:
                    settle(phase["settle"])
            if phase.get("until_cached", 0) <= outputs[0].num_cached_tokens:
                break
        self.results[phase["name"]] = {
            "seconds": round(time.monotonic() - began, 3),
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "finish": [output.outputs[0].finish_reason for output in outputs],
        }

    def replace_adapter(self, phase: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        engine, adapter = self.llm.llm_engine, adapter_of(phase)
        sampling = SamplingParams(temperature=0, max_tokens=phase["max_tokens"], ignore_eos=True)
        for index, parts in enumerate(phase["prompts"]):
            engine.add_request(f"{phase['name']}-{index}", prompt(parts), sampling, lora_request=adapter)
        answers: dict[str, list[int]] = {}
        first, is_replaced = f"{phase['name']}-0", False
        while engine.has_unfinished_requests():
            answers.update({output.request_id: list(output.outputs[0].token_ids) for output in engine.step()})
            if not is_replaced and len(answers.get(first, ())) >= phase["after"]:
                is_replaced = True
                engine.add_lora(LoRARequest(adapter.lora_name, adapter.lora_int_id, phase["by"], load_inplace=True))
        self.results[phase["name"]] = {"tokens": [answers[name] for name in sorted(answers)]}

    def embed(self, phase: dict[str, Any]) -> None:
        outputs = self.llm.embed([prompt(parts) for parts in phase["prompts"]], use_tqdm=False)
        self.results[phase["name"]] = {
            "embeddings": [list(output.outputs.embedding) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
        }

    def train_adapter(self, phase: dict[str, Any]) -> None:
        write_adapter(phase["path"], phase["seed"], self.llm.llm_engine.model_config.hf_config)

    def score(self, phase: dict[str, Any]) -> None:
        from tools.lab.regret import regrets

        prompts = [prompt(parts)["prompt_token_ids"] for parts in phase["prompts"]]
        # All answers have the same length.
        found = regrets(self.llm, prompts, phase["tokens"])
        self.results[phase["name"]] = sum(found) / len(found)

    def reset(self, phase: dict[str, Any]) -> None:
        from tools.lab.depot import let_dumps_end

        if self.socket is not None:
            let_dumps_end(Path(self.socket), DUMPS_S)
        for _ in range(50):
            if self.llm.reset_prefix_cache():
                return
            time.sleep(0.05)
        raise TimeoutError("vLLM does not reset its prefix cache: blocks are in use")

    def reset_all(self, phase: dict[str, Any]) -> None:
        self.results["reset_all"] = self.llm.llm_engine.reset_prefix_cache(reset_connector=True)

    def control(self, phase: dict[str, Any]) -> None:
        values = {key: value for key, value in phase.items() if key != "do"}
        with open(self.control_file + ".new", "w", encoding="utf-8") as file:
            json.dump(values, file)
        os.replace(self.control_file + ".new", self.control_file)

    def sibling(self, phase: dict[str, Any]) -> None:
        import sibling

        sibling.mode = phase["mode"]

    def sleep(self, phase: dict[str, Any]) -> None:
        time.sleep(phase["s"])

    def touch(self, phase: dict[str, Any]) -> None:
        with open(phase["file"], "w", encoding="utf-8"):
            pass

    def wait_for(self, phase: dict[str, Any]) -> None:
        end_s = time.monotonic() + OTHER_ENGINE_S
        while not os.path.exists(phase["file"]):
            if time.monotonic() > end_s:
                raise TimeoutError(f"{phase['file']} has not come within {OTHER_ENGINE_S} s")
            time.sleep(0.05)

    def step_until(self, phase: dict[str, Any]) -> None:
        end_s = time.monotonic() + STEPS_S
        while not os.path.exists(phase["file"]):
            if time.monotonic() > end_s:
                raise TimeoutError(f"{phase['file']} has not come within {STEPS_S} s")
            time.sleep(0.02)
            self.generate({"name": "steps", "prompts": phase["prompts"], "max_tokens": 1})

    def update_weights(self, phase: dict[str, Any]) -> None:
        self.llm.collective_rpc(change_weights, args=(phase.get("seed", 1),))

    def reload_weights(self, phase: dict[str, Any]) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": phase["model"]} if "model" in phase else {})

    def pause(self, phase: dict[str, Any]) -> None:
        self.llm.llm_engine.engine_core.engine_core.pause_scheduler("abort", clear_cache=True)

    def resume(self, phase: dict[str, Any]) -> None:
        self.llm.llm_engine.engine_core.engine_core.resume_scheduler()

    def nap(self, phase: dict[str, Any]) -> None:
        self.llm.sleep(phase.get("level", 1))
        self.llm.wake_up()

    def settle(self, phase: dict[str, Any]) -> None:
        settle(phase["socket"])

    def attached(self, phase: dict[str, Any]) -> None:
        end_s = time.monotonic() + ATTACHED_S
        while not all(self.llm.collective_rpc(worker_attached)) or not scheduler_attached(self.llm):
            if time.monotonic() > end_s:
                raise TimeoutError(f"the engine has not found its depot within {ATTACHED_S} s")
            time.sleep(0.05)

    def offloaded(self, phase: dict[str, Any]) -> None:
        from vllm import SamplingParams

        connector = self.llm.llm_engine.engine_core.engine_core.scheduler.connector
        end_s = time.monotonic() + ATTACHED_S
        while connector.has_pending_push_work():
            if time.monotonic() > end_s:
                raise TimeoutError(f"vLLM's offloading has not come to an end within {ATTACHED_S} s")
            # Jobs go on with the engine's steps. This prompt is shorter than a chunk: nothing of it is stored.
            self.llm.generate([prompt([[4711, 8]])], SamplingParams(max_tokens=2), use_tqdm=False)

    def forget_offloaded(self, phase: dict[str, Any]) -> None:
        self.offloaded(phase)
        self.reset(phase)
        offloading(self.llm).primary_tier.reset_cache()

    def tier_attached(self, phase: dict[str, Any]) -> None:
        wanted = not phase.get("no", False)
        end_s = time.monotonic() + ATTACHED_S
        while offloading(self.llm).secondary_tiers[0]._room.attached != wanted:
            if time.monotonic() > end_s:
                raise TimeoutError(f"the tier has not {'found' if wanted else 'lost'} its depot within {ATTACHED_S} s")
            time.sleep(0.02)

    def tier_counts(self, phase: dict[str, Any]) -> None:
        self.results[phase["name"]] = offloading(self.llm).secondary_tiers[0].counts()

    def kill_depot(self, phase: dict[str, Any]) -> None:
        from tools.lab.child import kill_process

        stats = with_depot(phase["socket"], lambda depot: json.loads(depot.stats_json()))
        # Until then it holds its medium.
        kill_process(int(stats["depot"]["pid"]))

    def upgrade(self, phase: dict[str, Any]) -> None:
        def serving() -> int:
            """Returns the serving process; 0 if the depot disappears during the query."""
            stats = with_depot(phase["socket"], lambda depot: json.loads(depot.stats_json()))
            return int(stats.get("depot", {}).get("pid", 0))

        def start() -> "subprocess.Popen[bytes]":
            with open(phase["log"], "a", encoding="utf-8") as log:
                return subprocess.Popen(phase["command"], stdout=log, stderr=log, start_new_session=True)

        child, rounds, over = start(), [], False
        end_s = time.monotonic() + UPGRADE_S
        while not over:
            if time.monotonic() > end_s:
                raise TimeoutError(f"no depot has taken over within {UPGRADE_S} s, see {phase['log']}")
            # Refused, for example by a depot too busy to freeze in time: the old one goes on, and is asked again.
            if child.poll() is not None:
                child = start()
            # Queried before the round, so that the last one begins at the new depot.
            over = serving() == child.pid
            self.reset({})
            fresh = [[phase["fresh"] + len(rounds), 300]]
            self.generate({**phase, "name": phase["name"], "prompts": [*phase["prompts"], fresh]})
            rounds.append(self.results[phase["name"]])
        self.results[phase["name"]] = rounds

    def metrics(self) -> dict[str, float]:
        found = {}
        for metric in self.llm.get_metrics():
            if metric.name in METRICS and getattr(metric, "value", 0):
                label = next((metric.labels[name] for name in LABELS if name in metric.labels), "")
                found[metric.name + ("/" + label if label else "")] = metric.value
        return found


def main(file_name: str) -> None:
    faulthandler.enable()
    from vllm import LLM

    with open(file_name, encoding="utf-8") as file:
        scenario: dict[str, Any] = json.load(file)
    options: dict[str, Any] = {**ENGINE, **scenario["engine"]}
    if scenario.get("connector") is not None:
        options["kv_transfer_config"] = scenario["connector"]
    if "kv_events_config" in options:
        from vllm.config import KVEventsConfig

        options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
    run = Run(LLM(**options), scenario["control"], scenario.get("socket"))
    for phase in scenario["phases"]:
        getattr(run, phase["do"])(phase)
    print("RESULT " + json.dumps({**run.results, "metrics": run.metrics()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
