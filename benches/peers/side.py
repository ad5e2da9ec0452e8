"""One side of a comparison, as a process: a line of JSON in, a line ``ROUND`` with JSON out (`tools.lab.rounds`).

Like `work`, this module runs in the peers' environments too.
"""

import json
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benches.peers.work import Blocks, Shape

LOOKED_UP = 128
LOOKUPS = 200
HITS = 100
NO_EPOCH = 1 << 20
"""An epoch that nobody has stored."""


class Side(ABC):
    """A store under test. Every method returns when what it names is done."""

    blocks: Blocks

    @abstractmethod
    def open(self, settings: dict[str, Any]) -> None:
        """Opens the store for ``self.blocks``."""

    @abstractmethod
    def dump(self, hashes: list[bytes]) -> None:
        """Stores all pages. Returns when the store lets the engine reuse them: the dump is acknowledged."""

    @abstractmethod
    def persist(self) -> None:
        """Waits until what was dumped is below the store's memory."""

    @abstractmethod
    def load(self, hashes: list[bytes]) -> list[int]:
        """Loads all pages. Returns the blocks of which the store says that they did not arrive."""

    def load_one(self, name: bytes, page: int) -> bool:
        """Loads one block into a page. Returns whether it arrived."""
        raise NotImplementedError

    def restore(self, hashes: list[bytes]) -> None:
        """Brings blocks from below into the store's memory, from where a device would copy them."""
        raise NotImplementedError

    def lookup(self, hashes: list[bytes]) -> int:
        """Returns how many leading blocks the store has."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Returns what a report should say about this process."""
        return {}


def cpu_s() -> float:
    """Returns the processor time of this process and of all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Program:
    """Answers requests for one side."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._answers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "open": self._open,
            "dump": self._dump,
            "load": self._load,
            "hit": self._hit,
            "restore": self._restore,
            "lookup": self._lookup,
            "memcpy": self._memcpy,
        }

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to one request."""
        return self._answers[asked["op"]](asked)

    def _open(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._side.blocks = Blocks(Shape(*asked["shape"]), asked["seed"])
        self._side.blocks.fill(asked.get("epoch", NO_EPOCH))
        begun = time.perf_counter()
        self._side.open(asked["settings"])
        return {"s": time.perf_counter() - begun, **self._side.facts()}

    def _dump(self, asked: dict[str, Any]) -> dict[str, Any]:
        blocks = self._side.blocks
        blocks.fill(asked["epoch"])
        hashes = blocks.hashes(asked["epoch"])
        begun, used = time.perf_counter(), cpu_s()
        self._side.dump(hashes)
        acknowledged = time.perf_counter()
        self._side.persist()
        return {
            "ack_s": acknowledged - begun,
            "persisted_s": time.perf_counter() - begun,
            "cpu_s": cpu_s() - used,
        }

    def _load(self, asked: dict[str, Any]) -> dict[str, Any]:
        blocks = self._side.blocks
        blocks.clear()
        hashes = blocks.hashes(asked["epoch"])
        begun, used = time.perf_counter(), cpu_s()
        failed = set(self._side.load(hashes))
        took, used = time.perf_counter() - begun, cpu_s() - used
        wrong = [index for index in blocks.wrong(asked["epoch"]) if index not in failed]
        return {"s": took, "cpu_s": used, "failed": len(failed), "wrong": len(wrong), "loaded": blocks.shape.blocks}

    def _hit(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Loads blocks one after another, each by a call of its own."""
        blocks = self._side.blocks
        blocks.clear()
        hashes = blocks.hashes(asked["epoch"], min(HITS, blocks.shape.blocks))
        took_us, failed = [], set()
        for page, name in enumerate(hashes):
            begun = time.perf_counter()
            if not self._side.load_one(name, page):
                failed.add(page)
            took_us.append((time.perf_counter() - begun) * 1e6)
        took_us.sort()
        asked_for = set(range(len(hashes))) - failed
        wrong = asked_for.intersection(blocks.wrong(asked["epoch"]))
        counts = {"failed": len(failed), "wrong": len(wrong), "loaded": len(hashes)}
        return {"p50_us": took_us[len(took_us) // 2], "p99_us": took_us[len(took_us) * 99 // 100], **counts}

    def _restore(self, asked: dict[str, Any]) -> dict[str, Any]:
        hashes = self._side.blocks.hashes(asked["epoch"])
        begun, used = time.perf_counter(), cpu_s()
        self._side.restore(hashes)
        return {"s": time.perf_counter() - begun, "cpu_s": cpu_s() - used}

    def _lookup(self, asked: dict[str, Any]) -> dict[str, Any]:
        blocks = self._side.blocks
        count = min(LOOKED_UP, blocks.shape.blocks) if asked["there"] else LOOKED_UP
        hashes = blocks.hashes(asked["epoch"] if asked["there"] else NO_EPOCH, count)
        took_us = []
        for _ in range(LOOKUPS):
            begun = time.perf_counter()
            found = self._side.lookup(hashes)
            took_us.append((time.perf_counter() - begun) * 1e6)
            if found != (count if asked["there"] else 0):
                raise RuntimeError(f"a lookup of {count} blocks finds {found}")
        took_us.sort()
        return {"p50_us": took_us[len(took_us) // 2], "p99_us": took_us[len(took_us) * 99 // 100]}

    def _memcpy(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"s": memcpy_s(self._side.blocks, asked["threads"])}


def memcpy_s(blocks: Blocks, threads: int, rounds: int = 3) -> float:
    """Returns the least time of a plain copy of the same bytes by that many threads, to memory touched before."""
    source = np.array_split(blocks.memory.reshape(-1), threads)
    target = np.array_split(np.ones(blocks.memory.size, np.uint8), threads)
    took = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            begun = time.perf_counter()
            list(pool.map(np.copyto, target, source))
            took.append(time.perf_counter() - begun)
    return min(took)


def serve(side: Side) -> None:
    """Answers until standard input ends."""
    program = Program(side)
    for line in sys.stdin:
        print("ROUND " + json.dumps(program.answer(json.loads(line))), flush=True)
