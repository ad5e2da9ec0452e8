"""One engine in this process: runs the steps of a plan and writes the results. Forked by ``runs.run_engine``.

A plan is ``{"engine": arguments of vllm.LLM, "result": path, "steps": [...]}``; ``runs`` makes the steps.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from tools.lab.depot import wait_until_clean
from tools.lab.machine import load_average
from tools.lab.models import prompt

SETTLE_S = 120.0
STEP_PAUSE_S = 0.1
STEADY_S = 1.0
RESET_TRIES = 50
NUDGE_TOKENS = 4


class Engine:
    """A vLLM engine and its operations."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        started_s = time.monotonic()
        self._llm = LLM(**arguments)
        self.result: dict[str, Any] = {
            "start_s": round(time.monotonic() - started_s, 1),
            "sent": {},
            "took_s": {},
            "load_average": [],
        }

    def send(self, name: str, prompts: list[list[int]], max_tokens: int, together: bool) -> None:
        """Sends prompts, each ``[seed, tokens]`` or several such parts in a row, in sequence or all together."""
        whole = [{"prompt_token_ids": joined(parts)} for parts in prompts]
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        answers = []
        for batch in [whole] if together else [[one] for one in whole]:
            began_s = time.monotonic()
            answers += self._llm.generate(batch, sampling, use_tqdm=False)
            self.result["took_s"].setdefault(name, []).append(time.monotonic() - began_s)
        self.result["load_average"].append(load_average())
        self.result["sent"].setdefault(name, []).extend(
            {
                "ttft_ms": answer.metrics.first_token_latency * 1e3,
                "hit_tokens": answer.num_cached_tokens,
                "output": list(answer.outputs[0].token_ids),
            }
            for answer in answers
        )

    def forget(self) -> None:
        """Empties vLLM's own prefix cache; a connector's cache stays."""
        for _ in range(RESET_TRIES):
            if self._llm.reset_prefix_cache():
                return
            self._nudge()
        raise RuntimeError("vLLM did not reset its prefix cache: blocks are still in use")

    def crowd(self, name: str, prompts: list[list[int]], max_tokens: int, steps: int) -> None:
        """Adds all prompts, then times the scheduler in ``steps`` steps; the remaining requests are aborted."""
        engine: Any = self._llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        names = []
        for number, (seed, tokens) in enumerate(prompts):
            whole = {"prompt_token_ids": prompt(seed, tokens)}
            names.append(engine.add_request(f"{name}-{number}", whole, sampling) or f"{name}-{number}")
        schedule, times_ms, running, waiting = scheduler.schedule, [], [], []

        def timed(*arguments: Any, **named: Any) -> Any:
            waiting.append(len(scheduler.waiting))
            began_s = time.perf_counter()
            output = schedule(*arguments, **named)
            times_ms.append((time.perf_counter() - began_s) * 1e3)
            running.append(len(scheduler.running))
            return output

        scheduler.schedule = timed
        began_s, done = time.monotonic(), 0
        while len(times_ms) < steps and engine.has_unfinished_requests():
            done += sum(1 for one in engine.step() if one.finished)
        took_s = time.monotonic() - began_s
        scheduler.schedule = schedule
        engine.abort_request(names, internal=True)
        while engine.has_unfinished_requests():
            engine.step()
        self.result["load_average"].append(load_average())
        self.result.setdefault("crowds", {})[name] = {
            "schedule_ms": times_ms,
            "running": running,
            "waiting": waiting,
            "took_s": took_s,
            "done": done,
        }

    def settle(self, socket: str | None, directory: str | None) -> None:
        """Waits until everything computed is stored: by a depot, or in files, or as far as steps can tell."""
        end_s = time.monotonic() + SETTLE_S
        steady_since_s, last = time.monotonic(), -1
        while time.monotonic() - steady_since_s < STEADY_S:
            # An engine in this process only steps when driven, and stores are started and finished in steps.
            self._nudge()
            now = sum(1 for path in Path(directory).rglob("*") if path.is_file()) if directory else 0
            if now != last:
                steady_since_s, last = time.monotonic(), now
            if time.monotonic() > end_s:
                raise TimeoutError(f"stores have not ended after {SETTLE_S:.0f} s")
            time.sleep(STEP_PAUSE_S)
        if socket:
            wait_until_clean(Path(socket), SETTLE_S)

    def _nudge(self) -> None:
        short = {"prompt_token_ids": prompt(0, NUDGE_TOKENS)}
        self._llm.generate([short], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)


def joined(parts: list[int]) -> list[int]:
    """Returns the tokens of all parts of a prompt, each given as its seed and its length."""
    return [token for seed, tokens in zip(parts[::2], parts[1::2], strict=True) for token in prompt(seed, tokens)]


def main(path: str) -> None:
    """Runs the plan at this path."""
    plan = json.loads(Path(path).read_text())
    engine = Engine(plan["engine"])
    can: dict[str, Callable[..., None]] = {
        "send": engine.send,
        "forget": engine.forget,
        "settle": engine.settle,
        "crowd": engine.crowd,
    }
    for step in plan["steps"]:
        can[step["do"]](**{name: value for name, value in step.items() if name != "do"})
    Path(plan["result"]).write_text(json.dumps(engine.result))
