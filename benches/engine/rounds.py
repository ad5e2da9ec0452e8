"""One round: every configuration once, each in its own engine process, because a connector is chosen at start."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.engine.runs import (
    EngineKind,
    Prompts,
    Result,
    Step,
    empty_directory,
    forget,
    kvdepot_transfer,
    native_transfer,
    run_engine,
    send,
    settle,
    tier_transfer,
    warm_up,
)
from tools.lab.depot import DepotHome
from tools.lab.machine import drop_from_page_cache
from tools.lab.models import WORK

DRAIN_S = 120.0
SEEDS_PER_LENGTH = 1000
OTHER_SEED = 500
COLD, OWN, HIT = "cold", "own", "hit"
"""Computed; found in vLLM's own prefix cache; found where the configuration stores it."""

Progress = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Bench:
    """The workload: ``repeats`` prompts of each length. A prompt has one token more than its nominal length.

    vLLM computes at least one token of a prompt; with the additional one, every kind of hit has the same length.
    """

    kind: EngineKind
    lengths: tuple[int, ...]
    repeats: int
    pool_bytes: int
    keep_page_cache: bool
    settings: Mapping[str, Any]

    def prompts(self, length: int) -> Prompts:
        """Returns seeds and lengths of the prompts of one length, which are sent twice."""
        first = length * SEEDS_PER_LENGTH
        return [(first + number, length + 1) for number in range(self.repeats)]

    def cold_then_hit(self, stored: Step, kept: bool) -> list[Step]:
        """Computes each prompt, sends it again, and, if it is ``kept`` elsewhere, once more after vLLM dropped it.

        Each hit follows the same pause, so that both run in the same minute and the same engine.
        """
        warm = send("warm-up", warm_up(self.lengths))
        steps = [warm, stored, *([forget()] if kept else []), warm]
        for length in self.lengths:
            for one in self.prompts(length):
                steps += [send(f"{COLD}/{length}", [one]), stored, send(f"{OWN}/{length}", [one])]
                if kept:
                    steps += [stored, forget(), send(f"{HIT}/{length}", [one])]
        return steps

    def hit_then_cold(self, stored: Step) -> list[Step]:
        """Sends each prompt, which an earlier process has stored, then again, then computes another one.

        The warm-up is a hit, too.
        """
        steps = [send("warm-up", warm_up(self.lengths))]
        for length in self.lengths:
            for seed, tokens in self.prompts(length):
                one, other = (seed, tokens), (seed + OTHER_SEED, tokens)
                steps += [send(f"{HIT}/{length}", [one]), stored, send(f"{OWN}/{length}", [one])]
                steps += [send(f"{COLD}/{length}", [other]), stored]
        return steps


def plain(bench: Bench) -> Result:
    """No connector: cold, and vLLM's own prefix cache, after as long a pause as the others take to store."""
    return run_engine("plain", bench.kind, None, bench.cold_then_hit(settle(), kept=False))


def kvdepot(bench: Bench) -> Mapping[str, Result]:
    """kvdepot: nothing found, from the pool, and from disk after engine and depot were killed."""
    values = {"pool_gb": bench.pool_bytes / (1 << 30), **bench.settings}
    with DepotHome(WORK / "bench-engine" / "kvdepot", values) as home:
        transfer = kvdepot_transfer(home)
        with home.start() as depot:
            steps = bench.cold_then_hit(settle(home=home), kept=True)
            first = run_engine("kvdepot", bench.kind, transfer, steps)
            depot.wait_until_clean(DRAIN_S)
        prepare_page_cache(bench, home.files())
        with home.start():
            steps = bench.hit_then_cold(settle(home=home))
            return {"kvdepot": first, "kvdepot-restarted": run_engine("kvdepot-restarted", bench.kind, transfer, steps)}


def native_memory(bench: Bench) -> Mapping[str, Result]:
    """Measures vLLM's own tier in host memory."""
    transfer = native_transfer(bench.pool_bytes, None, bench.kind.device)
    steps = bench.cold_then_hit(settle(), kept=True)
    return {"native-memory": run_engine("native-memory", bench.kind, transfer, steps)}


def native_files(bench: Bench) -> Mapping[str, Result]:
    """Measures vLLM's own file tier: hits of a new process on the files of an earlier one."""
    directory = empty_directory(WORK / "bench-engine" / "native-files")
    transfer = native_transfer(bench.pool_bytes, directory, bench.kind.device)
    stored = settle(directory=directory)
    every = [one for length in bench.lengths for one in bench.prompts(length)]
    warm = send("warm-up", warm_up(bench.lengths))
    run_engine("native-files", bench.kind, transfer, [warm, send("all", every), stored])
    prepare_page_cache(bench, (path for path in directory.rglob("*") if path.is_file()))
    steps = bench.hit_then_cold(stored)
    return {"native-files-restarted": run_engine("native-files-restarted", bench.kind, transfer, steps)}


def offloading_tier(bench: Bench) -> Mapping[str, Result]:
    """The depot below vLLM's offloading: hits of a new process and a new depot on files of ended ones."""
    values = {"pool_gb": bench.pool_bytes / (1 << 30), **bench.settings}
    with DepotHome(WORK / "bench-engine" / "kvdepot-tier", values) as home:
        transfer = tier_transfer(bench.pool_bytes, home, bench.kind.device)
        every = [one for length in bench.lengths for one in bench.prompts(length)]
        warm, stored = send("warm-up", warm_up(bench.lengths)), settle(home=home)
        with home.start() as depot:
            run_engine("kvdepot-tier", bench.kind, transfer, [warm, send("all", every), stored])
            depot.wait_until_clean(DRAIN_S)
        prepare_page_cache(bench, home.files())
        with home.start():
            steps = bench.hit_then_cold(stored)
            return {"kvdepot-tier-restarted": run_engine("kvdepot-tier-restarted", bench.kind, transfer, steps)}


def prepare_page_cache(bench: Bench, files: Iterable[Path]) -> None:
    """Drops the files from the page cache, unless it is to be kept."""
    if not bench.keep_page_cache:
        drop_from_page_cache(files)


CONFIGURATIONS: dict[str, tuple[str, Callable[[Bench], Mapping[str, Result]]]] = {
    "kvdepot": ("kvdepot, and again after a restart", kvdepot),
    "memory": ("vLLM's offloading to memory", native_memory),
    "files": ("vLLM's offloading to files, and again after a restart", native_files),
    "tier": ("kvdepot below vLLM's offloading, and again after a restart", offloading_tier),
}
"""What is compared with vLLM alone, by the name of the option."""


def run_round(bench: Bench, names: Sequence[str], progress: Progress) -> dict[str, Result]:
    """Runs vLLM alone and each of these configurations once."""
    with progress("vLLM without a connector"):
        found = {"plain": plain(bench)}
    for name in names:
        title, run = CONFIGURATIONS[name]
        with progress(title):
            found |= run(bench)
    return found
