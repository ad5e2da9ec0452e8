"""A depot if the level has one, LMCache's server, and a vLLM in this process's control: one life of all of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches.engine.runs import Result, Sent
from benches.lmcache.levels import DRAIN_S, Level
from tools.lab.depot import Depot
from tools.lab.machine import load_average
from tools.lab.warm import ON_ALL_CORES
from tools.lmcache.server import LMCacheServer
from tools.lmcache.vllm import Engine

CHUNK_TOKENS = 256
"""LMCache's default."""
IDLE_S = 120.0
END_S = 60.0


@dataclass(frozen=True)
class Life(Result):
    """Answers of one vLLM.

    Attributes:
        found: tokens that LMCache has found for a step's prompts, by its levels, as it counts them itself.
    """

    found: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


class Stack:
    """Running processes, and the answers that they have given."""

    def __init__(self, engine: Engine, server: LMCacheServer | None, depot: Depot | None) -> None:
        self.engine = engine
        self.server = server
        self.depot = depot
        self._answers: dict[str, list[dict[str, Any]]] = {}
        self._found: dict[str, dict[str, int]] = {}
        self._loads: list[float] = []

    def ask(self, step: str, seed: int, tokens: int, objects: int = 0) -> None:
        """Sends a prompt, and waits until its KV is stored, at least so many objects of it in L1."""
        before = self.server.hits() if self.server else {}
        answer = self.engine.ask(seed, 1, tokens)
        self._answers.setdefault(step, []).append(answer)
        self._loads.append(load_average())
        if self.server is None:
            return
        self.server.wait_until_idle(IDLE_S, objects)
        total = self._found.setdefault(step, {})
        for level, count in self.server.hits().items():
            total[level] = total.get(level, 0) + count - before[level]

    def forget(self, *, l1: bool = False) -> None:
        """Empties vLLM's own prefix cache, and LMCache's memory as well if asked to."""
        self.engine.flush()
        if self.server and l1:
            self.server.forget_all(IDLE_S)

    def end(self) -> None:
        """Ends all processes as an operator would, after everything has been stored."""
        if self.depot:
            self.depot.wait_until_clean(DRAIN_S)
        for one in (self.engine, self.server, self.depot):
            if one:
                one.end(END_S)

    def life(self) -> Life:
        """Returns all answers so far."""
        sent = {
            step: Sent(
                tuple(1e3 * one["first_s"][0] for one in answers),
                tuple(one["cached"][0] for one in answers),
                tuple(tuple(one["tokens"][0]) for one in answers),
            )
            for step, answers in self._answers.items()
        }
        return Life(sent, tuple(self._loads), found=self._found)


@contextmanager
def running(level: Level | None, root: Path, arguments: Mapping[str, Any]) -> Iterator[Stack]:
    """Starts a life; without a level, of vLLM alone. Whatever happens, nothing of it is left."""
    rest = dict(arguments)
    model = str(rest.pop("model"))
    root.mkdir(parents=True, exist_ok=True)
    if level is None:
        with Engine(root, model, 0, rest, ON_ALL_CORES) as engine:
            yield Stack(engine, None, None)
        return
    with (
        level.start() as depot,
        LMCacheServer(root, level.adapter(), l1_gb=level.l1_gb, chunk_tokens=CHUNK_TOKENS) as server,
        Engine(root, model, server.port, rest, ON_ALL_CORES) as engine,
    ):
        yield Stack(engine, server, depot)
