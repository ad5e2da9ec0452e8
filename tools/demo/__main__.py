"""Serves a model by real vLLM with a depot and sends long prompts three times: cold, warm, and after a kill -9 of both.

Exit status: 0 when every output is the same and blocks were found, 1 when not or when something failed.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tools.demo.client import HITS, QUERIES, Client, RequestError
from tools.demo.report import COLD, RESTARTED, WARM, Phase, conclude, show
from tools.demo.server import BLOCK_TOKENS, Server
from tools.lab.child import Child, ChildError
from tools.lab.depot import Depot, DepotHome
from tools.lab.machine import load_average
from tools.lab.models import WORK, ModelSize, make_model, prompt
from tools.lab.ports import LOOPBACK, free_port
from tools.lab.program import run_program
from tools.lab.progress import Progress
from tools.lab.settings import add_set_option

READY_S = 300.0
READY_POLL_S = 0.25
DRAIN_S = 120.0
WARM_UP_TOKENS = 512
WARM_UP_SEED = 1_000_000
STAYING = "vLLM and the depot run on"
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
    port: int

    @contextmanager
    def running(self) -> Iterator[tuple[Depot, Client, "Killers"]]:
        """Yields a depot and a server that are ready; both are ended at the end."""
        with ExitStack() as stack:
            with self.progress.step("start the depot"):
                depot = stack.enter_context(self.home.start())
            log = self.home.root / "vllm.log"
            longest = max(map(len, self.prompts)) + self.answer_tokens
            more = {"port": self.port} if self.port else {}
            server = stack.enter_context(Server(self.model, self.home.config, self.dtype, longest, log, more))
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

    def run(self, ended: Callable[[list[Phase]], None]) -> list[Phase]:
        """Runs all phases; ``ended`` is called with them while the last depot and vLLM are still running."""
        with self.running() as (depot, client, killers):
            cold = self.phase(COLD, client)
            self.drain(depot)
            warm = self.phase(WARM, client)
            self.drain(depot)
            killers.kill()
            self.progress.note("vLLM and the depot were killed with -9; blocks on disk are all that is left")
        with self.running() as (_, client, _):
            phases = [cold, warm, self.phase(RESTARTED, client)]
            ended(phases)
            return phases

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
    parser.add_argument("--port", type=int, default=0, help="port of vLLM; default 0: a free one")
    text = "seconds for which vLLM and depot run on after the last phase, or until Ctrl-C; default 0"
    parser.add_argument("--stay", type=float, default=0.0, metavar="S", help=text)
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
    values = {"pool_gb": pool_gb, "metrics_port": free_port(), **dict(arguments.settings)}
    home = DepotHome(WORK / "demo", values)

    def ended(phases: list[Phase]) -> None:
        report(phases, arguments, home.blocks)
        if arguments.stay:
            progress.note(f"{STAYING} for {arguments.stay:g} s, or until Ctrl-C")
            with suppress(KeyboardInterrupt):
                threading.Event().wait(arguments.stay)

    try:
        if values["metrics_port"] is not None:
            progress.note(f"the depot's status page, while it runs: http://{LOOPBACK}:{values['metrics_port']}/")
        with progress.step("make a model of random weights"):
            model = make_model(size)
        prompts = [prompt(seed, arguments.tokens) for seed in range(arguments.prompts)]
        demo = Demo(prompts, arguments.answer_tokens, arguments.dtype, model, home, progress, arguments.port)
        phases = demo.run(ended)
    finally:
        home.remove()
    return conclude(phases, progress)


def main() -> int:
    """Reads the command line and demonstrates."""
    arguments = parse()
    return run_program(lambda progress: demonstrate(arguments, progress), (ChildError, RequestError, OSError))


if __name__ == "__main__":
    sys.exit(main())
