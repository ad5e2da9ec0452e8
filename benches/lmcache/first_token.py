"""Time to first token: computed, from LMCache's memory, from the second level, and after everything was restarted."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from benches.engine.rounds import COLD, HIT, OTHER_SEED, OWN
from benches.lmcache.levels import LEVELS, Place, Sizes
from benches.lmcache.stack import CHUNK_TOKENS, Life, Stack, running
from benches.lmcache.summary import L1, L2, PLAIN, RESTARTED, Round
from benches.peers.work import MIB
from tools.lab.machine import drop_from_page_cache

FIRST_SEED, WARM_SEED = 1, 999_999
MEMORY_EPOCHS = 6
"""A side's memory holds its prompts this many times: LMCache begins to evict long before its memory is full."""
MEDIUM_EPOCHS = 12
MARGIN_BYTES = 256 * MIB

Step = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class FirstToken:
    """The measurement. A prompt has one token more than its nominal length, which vLLM computes in every case.

    Attributes:
        place: where levels write.
        arguments: of ``vllm.LLM``.
        tokens: nominal length, a multiple of LMCache's chunks.
        repeats: number of prompts.
        token_bytes: KV of a token.
        settings: keys of kvdepot's configuration.
        keep_page_cache: whether files are read that the kernel still has in memory.
    """

    place: Place
    arguments: Mapping[str, Any]
    tokens: int
    repeats: int
    token_bytes: int
    settings: Mapping[str, Any]
    keep_page_cache: bool

    @property
    def sizes(self) -> Sizes:
        """Space for all prompts, those of the second life, too."""
        prompts = self.repeats * self.tokens * self.token_bytes
        half = MEMORY_EPOCHS * prompts // 2 + MARGIN_BYTES
        return Sizes(half, half, MEDIUM_EPOCHS * prompts + 2 * MARGIN_BYTES, CHUNK_TOKENS * self.token_bytes)

    def round(self, names: Sequence[str], step: Step, *, backwards: bool) -> Round:
        """Measures vLLM alone and then each of these levels, or, ``backwards``, vLLM alone last."""
        found: Round = {}
        for name in (*names, PLAIN) if backwards else (PLAIN, *names):
            if name == PLAIN:
                with step("vLLM without a connector"):
                    found[PLAIN] = self._plain()
            else:
                found |= self._level(name, step)
        return found

    def _plain(self) -> Life:
        with running(None, self.place.disk / PLAIN, self.arguments) as stack:
            stack.ask("warm-up", WARM_SEED, self.tokens + 1)
            for seed in self._seeds():
                stack.ask(self._of(COLD), seed, self.tokens + 1)
                stack.ask(self._of(OWN), seed, self.tokens + 1)
            return stack.life()

    def _level(self, name: str, step: Step) -> Round:
        kind = LEVELS[name]
        with kind(self.place, self.sizes, self.settings) as level:
            with (
                step(f"{kind.title}: computed, and found again"),
                running(level, level.root / "first", self.arguments) as stack,
            ):
                if stack.server:
                    self.place.note("first-token", kind.title, stack.server.command)
                self._first_life(stack)
                first = stack.life()
                stack.end()
            if not self.keep_page_cache:
                drop_from_page_cache(level.files())
            with (
                step(f"{kind.title}: after a restart of everything"),
                running(level, level.root / "second", self.arguments) as stack,
            ):
                self._second_life(stack)
                second = stack.life()
                stack.end()
        return {name: first, name + RESTARTED: second}

    def _first_life(self, stack: Stack) -> None:
        """Each hit follows a pause in which nothing is stored any more."""
        for seed, steps in [(WARM_SEED, dict.fromkeys((COLD, OWN, L1, L2), "warm-up"))] + [
            (seed, {step: self._of(step) for step in (COLD, OWN, L1, L2)}) for seed in self._seeds()
        ]:
            stack.ask(steps[COLD], seed, self.tokens + 1, objects=self.tokens // CHUNK_TOKENS)
            stack.ask(steps[OWN], seed, self.tokens + 1)
            stack.forget()
            stack.ask(steps[L1], seed, self.tokens + 1)
            stack.forget(l1=True)
            stack.ask(steps[L2], seed, self.tokens + 1)
            stack.forget(l1=True)

    def _second_life(self, stack: Stack) -> None:
        """The warm-up is a hit, too. Cold runs are of other prompts."""
        stack.ask("warm-up", WARM_SEED, self.tokens + 1)
        for seed in self._seeds():
            stack.ask(self._of(HIT), seed, self.tokens + 1)
            stack.ask(self._of(OWN), seed, self.tokens + 1)
            stack.ask(self._of(COLD), seed + OTHER_SEED, self.tokens + 1)

    def _seeds(self) -> range:
        return range(FIRST_SEED, FIRST_SEED + self.repeats)

    def _of(self, step: str) -> str:
        return f"{step}/{self.tokens}"
