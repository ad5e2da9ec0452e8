"""Serves prompts by real SGLang on a CPU over a depot three times: cold, warm, and after a kill -9 of both.

Exit status: 0 when every output is the same and blocks were found, 1 when not or when something failed.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.demo.client import Answer
from tools.demo.report import COLD, RESTARTED, WARM, Phase, conclude, show
from tools.lab.child import ChildError
from tools.lab.depot import Depot, DepotHome
from tools.lab.machine import load_average
from tools.lab.models import WORK, ModelSize, make_model
from tools.lab.program import run_program
from tools.lab.progress import Progress
from tools.sglang.engine import Engine, depot_backend, depot_linker

ARGUMENTS = {"max_total_tokens": 65_536}
# A timeout is a miss, but the machine may be busy, and hits are shown.
CALL_MS = 8000
DRAIN_S = 120.0
GIB = 1 << 30
PAGE_TOKENS = 32
SEED = 1
STORED_POLL_S = 0.05
WARM_UP = {"seed": 1_000_000, "count": 1, "tokens": 512, "answer_tokens": 1}


@dataclass
class Demo:
    """The demonstration: what is common to its phases."""

    prompts: int
    tokens: int
    answer_tokens: int
    door: str
    model: Path
    home: DepotHome
    progress: Progress

    @contextmanager
    def running(self) -> Iterator[tuple[Depot, Engine]]:
        """Yields a depot and an SGLang; both are killed at the end."""
        with self.home.start() as depot:
            said = {"config": str(self.home.config)}
            door = depot_linker(said) if self.door == "linker" else depot_backend(said)
            with self.progress.step("start SGLang"):
                engine = Engine(self.home.root, str(self.model), {**ARGUMENTS, **door})
                engine.ask(**WARM_UP)
            with engine:
                yield depot, engine

    def phase(self, name: str, engine: Engine) -> Phase:
        """Sends all prompts."""
        with self.progress.step(f"{name}: {self.prompts} prompts of {self.tokens} tokens"):
            said = engine.ask(SEED, self.prompts, self.tokens, answer_tokens=self.answer_tokens)
        pairs = zip(said["first_s"], said["tokens"], strict=True)
        answers = tuple(Answer(first_s, tuple(tokens)) for first_s, tokens in pairs)
        return Phase(name, answers, sum(said["from_depot"]), self.tokens, load_average())

    def run(self) -> list[Phase]:
        """Runs all phases."""
        # The depot has counted those of the warm-up, too.
        pages = self.prompts * (self.tokens // PAGE_TOKENS) + WARM_UP["tokens"] // PAGE_TOKENS
        with self.running() as (depot, engine):
            cold = self.phase(COLD, engine)
            with self.progress.step("wait until the depot has written every block to disk"):
                wait_until_stored(depot, pages)
                depot.wait_until_clean(DRAIN_S)
            engine.flush()
            warm = self.phase(WARM, engine)
            engine.kill()
            depot.kill()
            self.progress.note("SGLang and the depot were killed with -9; blocks on disk are all that is left")
        with self.running() as (_, engine):
            return [cold, warm, self.phase(RESTARTED, engine)]


def wait_until_stored(depot: Depot, pages: int) -> None:
    """Waits until the depot has this many blocks: SGLang stores them after it has answered.

    Raises:
        ChildError: that takes too long.
    """
    end_s = time.monotonic() + DRAIN_S
    while (depot.stats() or {}).get("dump_blocks_sealed", 0) < pages:
        if time.monotonic() > end_s:
            raise ChildError(f"the depot has not got {pages} blocks after {DRAIN_S:.0f} s")
        time.sleep(STORED_POLL_S)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--door", choices=("linker", "hicache"), default="linker", help="default linker")
    parser.add_argument("--prompts", type=int, default=3, help="default 3")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a prompt, default 4096")
    parser.add_argument("--answer-tokens", type=int, default=16, help="tokens of an answer, default 16")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    # HiCache asks its storage only for more tokens than this.
    if arguments.prompts < 1 or arguments.tokens < 512 or arguments.answer_tokens < 1:
        parser.error("needs at least one prompt of 512 tokens, and one token of answer")
    return arguments


def demonstrate(arguments: argparse.Namespace, progress: Progress) -> int:
    """Runs the demonstration."""
    size = ModelSize()
    stored_bytes = arguments.prompts * arguments.tokens * size.kv_bytes_per_token("float32")
    # A rank's hits hold a quarter of the pool at most.
    pool_gb = round(4 * stored_bytes / GIB + 0.25, 2)
    home = DepotHome(WORK / "demo-sglang", {"pool_gb": pool_gb, "load_policy": "all", "call_timeout_ms": CALL_MS})
    try:
        with progress.step("make a model of random weights"):
            model = make_model(size)
        demo = Demo(arguments.prompts, arguments.tokens, arguments.answer_tokens, arguments.door, model, home, progress)
        phases = demo.run()
    finally:
        home.remove()
    title = f"SGLang with kvdepot ({arguments.door}): {arguments.prompts} prompts of {arguments.tokens} tokens"
    facts: dict[str, object] = {"door": arguments.door, "prompt_tokens": arguments.tokens}
    show(phases, title, facts, as_json=arguments.json)
    return conclude(phases, progress)


def main() -> int:
    """Reads the command line and demonstrates."""
    arguments = parse()
    return run_program(lambda progress: demonstrate(arguments, progress), (ChildError, OSError))


if __name__ == "__main__":
    sys.exit(main())
