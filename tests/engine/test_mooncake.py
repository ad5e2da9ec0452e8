"""Mooncake's own master and holder below two depots, with a real vLLM on each: one's prompts are the other's hits."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from engine_lab import Lab

from tools.lab.child import POLL_S
from tools.lab.depot import depot_stats, wait_until_clean
from tools.lab.depot_files import GIB
from tools.lab.forked_engine import ForkedEngine
from tools.lab.models import prompt
from tools.lab.mooncake import Mooncake
from tools.lab.subject import BLOCK_TOKENS, Subject
from tools.lab.warm import Warm

ENVIRONMENT = os.environ.get("KVDEPOT_TEST_MOONCAKE")
pytestmark = pytest.mark.skipif(ENVIRONMENT is None, reason="make test-mooncake runs it")

# A token of a prompt that is hit stays to be computed.
PROMPTS = [prompt(seed, 330) for seed in range(8)]
HITS = [330 // BLOCK_TOKENS * BLOCK_TOKENS for _ in PROMPTS]
BLOCKS = sum(HITS) // BLOCK_TOKENS
ANSWER_TOKENS = 16
BLOCK_BYTES = 131_072
# Half of all blocks: what both depots have forgotten comes from Mooncake.
POOL_BLOCKS = BLOCKS // 2
SETTLE_S = 60
BACK_S = 180
"""Only what never comes back takes so long."""
CALL_MS = 10_000
ROUND_S_MAX = 200.0
"""Eight requests that are all misses, on a busy machine; a call of Mooncake ends after 10 s."""


@dataclass(frozen=True)
class Round:
    """What one engine answered to all prompts, asked one by one, and what its depot read from Mooncake meanwhile."""

    began_s: float
    seconds: float
    cached: list[int]
    read_blocks: int


class Node:
    """An engine and its depot. Each of its answers is compared with the reference (P1)."""

    def __init__(self, engine: ForkedEngine, socket: Path, reference: list[list[int]]) -> None:
        self.engine, self.socket = engine, socket
        self.rounds: list[Round] = []
        self.load = Future[None]()
        self._reference = reference
        assert engine.ready(), engine.log.read_text()[-4000:]

    def stats(self) -> dict[str, Any]:
        end_s = time.monotonic() + SETTLE_S
        # A busy machine may not run the depot for as long as one question lasts.
        while (stats := depot_stats(self.socket)) is None:
            assert time.monotonic() < end_s, "the depot answers"
        return stats

    def ask_all(self) -> Round:
        """Asks every prompt once."""
        read, began_s = self.stats()["fetch_blocks"], time.monotonic()
        cached = []
        for tokens, right in zip(PROMPTS, self._reference, strict=True):
            found = self.engine.ask({"prompts": [tokens]})
            assert found is not None, self.engine.log.read_text()[-4000:]
            assert found["tokens"] == [right]
            cached += found["cached"]
        done = Round(began_s, time.monotonic() - began_s, cached, self.stats()["fetch_blocks"] - read)
        assert done.seconds < ROUND_S_MAX, "misses take bounded time (P2)"
        self.rounds.append(done)
        return done

    def settle(self) -> None:
        """Waits until Mooncake has what was dumped."""
        wait_until_clean(self.socket, SETTLE_S)

    def end(self) -> None:
        """Lets the engine exit, and kills its depot."""
        self.engine.stop()
        os.kill(int(self.stats()["pid"]), signal.SIGKILL)


@contextmanager
def under_load(*nodes: Node) -> Iterator[None]:
    """Asks all prompts again and again. A node's failure is raised at the end."""
    over = Event()

    def ask(node: Node) -> None:
        while not over.is_set():
            node.ask_all()

    with ThreadPoolExecutor() as pool:
        for node in nodes:
            node.load = pool.submit(ask, node)
        try:
            yield
        finally:
            over.set()
            for node in nodes:
                node.load.result()


def wait_for_round(nodes: tuple[Node, ...], what: str, fits: Callable[[Round], bool]) -> None:
    """Waits until each node has such a round, all of it after now."""
    now_s = time.monotonic()
    while not all(any(one.began_s > now_s and fits(one) for one in node.rounds) for node in nodes):
        assert not any(node.load.done() for node in nodes), what
        assert time.monotonic() < now_s + BACK_S, (what, [node.rounds[-3:] for node in nodes])
        time.sleep(POLL_S)


def from_mooncake(found: Round) -> bool:
    """Whether all was hit, of which the pool can have had a part only."""
    return found.cached == HITS and found.read_blocks >= BLOCKS - POOL_BLOCKS


def assert_from_mooncake_alone(found: Round) -> None:
    assert found.cached == HITS
    assert found.read_blocks >= BLOCKS


def with_misses(found: Round) -> bool:
    return sum(found.cached) < sum(HITS)


def test_two_engines_share_a_mooncake_that_is_killed_and_started_again(real_lab: Lab) -> None:
    """Tokens are those of an engine without a depot, whatever happens to the store; hits come back by themselves."""
    lab, runtime = real_lab, real_lab.short_root()
    with ExitStack() as stack:
        # It imports while the reference is computed.
        warm = stack.enter_context(Warm(lab.root / "warm.log", lab.python))
        mooncake = stack.enter_context(Mooncake(Path(str(ENVIRONMENT)), lab.root))

        def engine(name: str, warm: Warm, options: dict[str, Any] | None) -> ForkedEngine:
            arguments = {**Subject("llama", 1).engine, "model": lab.model("llama")}
            if options is not None:
                arguments["kv_transfer_config"] = {
                    "kv_connector": "KVDepotConnector",
                    "kv_role": "kv_both",
                    "kv_connector_module_path": "kvdepot.engines.vllm",
                    "kv_connector_extra_config": lab.options(options),
                }
            plan = {"answer_tokens": ANSWER_TOKENS, "engine": arguments}
            made = ForkedEngine(warm, runtime, plan, name)
            stack.callback(made.close)
            return made

        def node(name: str, warm: Warm) -> Node:
            options = {
                "socket": str(runtime / f"{name}-depot.sock"),
                "pipeline": "Cache|Mooncake",
                "directories": None,
                "pool_gb": POOL_BLOCKS * BLOCK_BYTES / GIB,
                **mooncake.options(),
                "mooncake_timeout_ms": CALL_MS,
            }
            return Node(engine(name, warm, options), Path(options["socket"]), reference)

        plain = engine("plain", lab.warm, None)
        assert plain.ready()
        found = [plain.ask({"prompts": [tokens]}) for tokens in PROMPTS]
        plain.stop()
        reference = [one["tokens"][0] for one in found if one is not None]

        one, two = node("one", lab.warm), node("two", warm)
        assert one.ask_all().cached == [0 for _ in PROMPTS]
        one.settle()
        assert_from_mooncake_alone(two.ask_all())
        one.end()
        # Nothing of the first depot is left, and this one has nothing of its own.
        three = node("three", lab.warm)
        assert_from_mooncake_alone(three.ask_all())
        both = (two, three)
        with under_load(*both):
            wait_for_round(both, "before anything is killed", from_mooncake)
            mooncake.kill_master()
            wait_for_round(both, "without a master", with_misses)
            mooncake.start_master()
            wait_for_round(both, "with another master", from_mooncake)
            mooncake.kill_holder()
            wait_for_round(both, "without a holder", with_misses)
            mooncake.start_holder()
            wait_for_round(both, "with another holder", from_mooncake)
