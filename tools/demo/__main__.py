"""Serves a model by real vLLM with a depot and sends long prompts three times: cold, warm, and after a kill -9 of both.

Exit status: 0 when every output is the same and blocks were found, 1 when not or when something failed.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.demo.client import HITS, QUERIES, Client, RequestError
from tools.demo.report import COLD, RESTARTED, WARM, Phase, conclude, show
from tools.demo.server import BLOCK_TOKENS, Server
from tools.lab.child import Child, ChildError
from tools.lab.depot import Depot, DepotHome
from tools.lab.machine import load_average
from tools.lab.models import WORK, ModelSize, make_model, prompt
from tools.lab.program import run_program
from tools.lab.progress import Progress
from tools.lab.settings import add_set_option

READY_S = 300.0
READY_POLL_S = 0.25
DRAIN_S = 120.0
WARM_UP_TOKENS = 512
WARM_UP_SEED = 1_000_000
GIB = 1 << 30


@dataclass
class Demo:
    """The demonstration: state that is common to its phases."""

    prompts: list[list[int]]
    answer_tokens: int
    dtype: str
    model: Path
    home: DepotHome
    progress: Progress

    @contextmanager
    def running(self) -> Iterator[tuple[Depot, Client, "Killers"]]:
        """Yields a depot and a server that are ready; both are ended at the end."""
        with ExitStack() as stack:
            with self.progress.step("start the depot"):
                depot = stack.enter_context(self.home.start())
            log = self.home.root / "vllm.log"
            longest = max(map(len, self.prompts)) + self.answer_tokens
            server = stack.enter_context(Server(self.model, self.home.config, self.dtype, longest, log))
            client = Client(server.port)
            with self.progress.step("start vLLM", lambda: (server.lines() or [""])[-1]):
                wait_until_healthy(server, client)
            with self.progress.step("warm up with another prompt"):
                client.complete(prompt(WARM_UP_SEED, min(WARM_UP_TOKENS, longest - 1)), 1)
            yield depot, client, Killers(server, depot)

    def phase(self, name: str, client: Client) -> Phase:
        """Sends all prompts."""
        before = client.counters()
        answers = []
        for number, tokens in enumerate(self.prompts, 1):
            with self.progress.step(f"{name}: prompt {number} of {len(self.prompts)}, {len(tokens)} tokens"):
                answers.append(client.complete(tokens, self.answer_tokens))
        queried = sum(map(len, self.prompts))
        hits = client.counters(before[QUERIES] + queried)[HITS] - before[HITS]
        return Phase(name, tuple(answers), hits, len(self.prompts[0]), load_average())

    def run(self) -> list[Phase]:
        """Runs all phases."""
        with self.running() as (depot, client, killers):
            cold = self.phase(COLD, client)
            self.drain(depot)
            warm = self.phase(WARM, client)
            self.drain(depot)
            killers.kill()
            self.progress.note("vLLM and the depot were killed with -9; blocks on disk are all that is left")
        with self.running() as (_, client, _):
            return [cold, warm, self.phase(RESTARTED, client)]

    def drain(self, depot: Depot) -> None:
        """Waits until everything is on disk, because a kill -9 loses the rest."""
        with self.progress.step("wait until the depot has written every block to disk"):
            depot.wait_until_clean(DRAIN_S)


@dataclass(frozen=True)
class Killers:
    """Kills both; the engine first, because it would start another depot when it loses its own."""

    server: Child
    depot: Child

    def kill(self) -> None:
        """SIGKILL."""
        self.server.kill()
        self.depot.kill()


def wait_until_healthy(server: Server, client: Client) -> None:
    """Waits until the server answers.

    Raises:
        ChildError: it ended, or does not answer in time.
    """
    while not client.healthy():
        server.check()
        if time.monotonic() - server.started_s > READY_S:
            raise ChildError(f"vLLM does not answer after {READY_S:.0f} s\n{server.tail()}")
        time.sleep(READY_POLL_S)


def report(phases: list[Phase], arguments: argparse.Namespace, directory: Path) -> None:
    """Prints the results."""
    facts: dict[str, object] = {
        "prompts": arguments.prompts,
        "prompt_tokens": arguments.tokens,
        "dtype": arguments.dtype,
        "settings": dict(arguments.settings),
        "directory": str(directory),
    }
    captions = []
    if any(0 < phase.total_blocks - phase.hit_blocks <= len(phase.answers) for phase in phases[1:]):
        captions.append("vLLM computes at least one token of a prompt, and with it that token's block.")
    title = f"vLLM with kvdepot: {arguments.prompts} prompts of {arguments.tokens} tokens, {arguments.dtype}"
    show(phases, title, facts, as_json=arguments.json, captions=captions)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=3, help="default 3")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a prompt, default 4096")
    parser.add_argument("--answer-tokens", type=int, default=16, help="tokens of an answer, default 16")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16 rounds: outputs may then differ"
    )
    add_set_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.prompts < 1 or arguments.tokens <= BLOCK_TOKENS or arguments.answer_tokens < 1:
        parser.error(f"needs at least one prompt of more than {BLOCK_TOKENS} tokens, and one token of answer")
    return arguments


def demonstrate(arguments: argparse.Namespace, progress: Progress) -> int:
    """Runs the demonstration."""
    size = ModelSize()
    stored_bytes = arguments.prompts * arguments.tokens * size.kv_bytes_per_token(arguments.dtype)
    pool_gb = round(2 * stored_bytes / GIB + 0.25, 2)
    home = DepotHome(WORK / "demo", {"pool_gb": pool_gb, **dict(arguments.settings)})
    try:
        with progress.step("make a model of random weights"):
            model = make_model(size)
        prompts = [prompt(seed, arguments.tokens) for seed in range(arguments.prompts)]
        phases = Demo(prompts, arguments.answer_tokens, arguments.dtype, model, home, progress).run()
    finally:
        home.remove()
    report(phases, arguments, home.blocks)
    return conclude(phases, progress)


def main() -> int:
    """Reads the command line and demonstrates."""
    arguments = parse()
    return run_program(lambda progress: demonstrate(arguments, progress), (ChildError, RequestError, OSError))


if __name__ == "__main__":
    sys.exit(main())
