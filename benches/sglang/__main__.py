"""Measures the time to first token of SGLang's hits: on its device, in its host memory and files, and in a depot.

Each kind has its own SGLang, one after another, which first computes the prompts (cold). Every hit is checked: all
pages but the last come from where the kind says, and the first token is the cold one.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from tools.lab.child import ChildError
from tools.lab.depot import Depot, DepotHome
from tools.lab.machine import load_average, machine
from tools.lab.models import WORK, ModelSize, make_model
from tools.lab.program import run_program
from tools.lab.progress import Progress
from tools.sglang.engine import Engine, depot_backend, depot_linker

# A timeout is a miss, but the machine may be busy, and hits are counted.
CALL_MS = 8000
GIB = 1 << 30
KINDS = ("device", "host", "files", "hicache", "linker")
PAGE_TOKENS = 32
PROMPTS_SEED, OTHERS_SEED = 1, 2
STORED_S, POLL_S = 300.0, 0.1
WARM_UP = {"seed": 3, "count": 1, "tokens": 512, "answer_tokens": 1}


@dataclass(frozen=True)
class Row:
    """What one kind of hit took."""

    kind: str
    cold_ms: list[float]
    hit_ms: list[float]
    load_average: float

    @property
    def of_cold(self) -> float:
        """Median over the prompts of the time of a hit, divided by the time of the same prompt computed."""
        return median(hit / cold for hit, cold in zip(self.hit_ms, self.cold_ms, strict=True))


class Bench:
    """Runs the kinds over the same prompts."""

    def __init__(self, arguments: argparse.Namespace, progress: Progress) -> None:
        size = ModelSize()
        self._asked = {"seed": PROMPTS_SEED, "count": arguments.repeats, "tokens": arguments.tokens, "answer_tokens": 1}
        self._pages = arguments.repeats * (arguments.tokens // PAGE_TOKENS)
        self._root = WORK / "bench-sglang"
        shutil.rmtree(self._root, ignore_errors=True)
        self._progress = progress
        with progress.step("make a model of random weights"):
            self._model = str(make_model(size))
        self._bytes = self._pages * PAGE_TOKENS * size.kv_bytes_per_token("float32")
        self._page_tokens = self._pages * PAGE_TOKENS

    def row(self, kind: str) -> Row:
        """Measures a kind."""
        if kind == "device":
            return self._device()
        if kind == "host":
            return self._host()
        if kind == "files":
            return self._files()
        if kind == "hicache":
            return self._depot("kvdepot below HiCache", depot_backend)
        return self._depot("kvdepot as linker", depot_linker)

    def _device(self) -> Row:
        """The yardstick: what SGLang itself takes for a hit that nothing has to be copied for."""
        with self._engine("device", {}) as engine:
            return self._row("device", engine, self._cold("device", engine), "cached")

    def _host(self) -> Row:
        """The device has space for the prompts only, so that others push them out into the host's memory."""
        with self._engine("host", {"max_total_tokens": self._page_tokens + 4096, "hicache_ratio": 4.0}) as engine:
            cold = self._cold("HiCache's host memory", engine)
            engine.ask(**{**self._asked, "seed": OTHERS_SEED})
            return self._row("HiCache's host memory", engine, cold, "from_host")

    def _files(self) -> Row:
        directory = self._root / "files-of-hicache"
        directory.mkdir(parents=True)
        environ = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(directory)}
        with self._engine("file", {"hicache_storage_backend": "file"}, **environ) as engine:
            cold = self._cold("HiCache's files", engine)
            self._wait_until_stored(lambda: sum(1 for path in directory.rglob("*") if path.is_file()))
            engine.flush()
            return self._row("HiCache's files", engine, cold, "from_depot")

    def _depot(self, kind: str, door: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Row:
        # A rank's hits hold a quarter of the pool at most.
        values = {"pool_gb": round(4 * self._bytes / GIB + 0.25, 2), "load_policy": "all", "call_timeout_ms": CALL_MS}
        name = kind.rpartition(" ")[2]
        with (
            DepotHome(self._root / name, values) as home,
            home.start() as depot,
            self._engine(f"{name}-engine", door({"config": str(home.config)})) as engine,
        ):
            cold = self._cold(kind, engine)
            # The depot has counted those of the warm-up, too.
            self._wait_until_stored(lambda: stored_blocks(depot) - WARM_UP["tokens"] // PAGE_TOKENS)
            engine.flush()
            return self._row(kind, engine, cold, "from_depot")

    @contextmanager
    def _engine(self, name: str, arguments: Mapping[str, Any], **environ: str) -> Iterator[Engine]:
        space = {"max_total_tokens": self._page_tokens + 16_384}
        with Engine(self._root / name, self._model, {**space, **arguments}, **environ) as engine:
            with self._progress.step(f"{name}: start SGLang"):
                engine.ask(**WARM_UP)
            yield engine

    def _cold(self, kind: str, engine: Engine) -> dict[str, Any]:
        with self._progress.step(f"{kind}: compute"):
            return engine.ask(**self._asked)

    def _row(self, kind: str, engine: Engine, cold: dict[str, Any], found: str) -> Row:
        with self._progress.step(f"{kind}: hits"):
            hit = engine.ask(**self._asked)
        whole = (self._asked["tokens"] - 1) // PAGE_TOKENS * PAGE_TOKENS
        if hit["tokens"] != cold["tokens"] or any(tokens < whole for tokens in hit[found]):
            raise ChildError(f"{kind}: hits of {hit[found]} tokens, or other tokens than cold; the log: {engine.log}")
        times = [[1e3 * first_s for first_s in one["first_s"]] for one in (cold, hit)]
        return Row(kind, times[0], times[1], load_average())

    def _wait_until_stored(self, pages: Callable[[], int]) -> None:
        """Waits for what SGLang writes after it has answered."""
        end_s = time.monotonic() + STORED_S
        while pages() < self._pages:
            if time.monotonic() > end_s:
                raise ChildError(f"{pages()} of {self._pages} pages are stored after {STORED_S:.0f} s")
            time.sleep(POLL_S)


def stored_blocks(depot: Depot) -> int:
    """Returns the number of blocks that a depot has been given since its start."""
    return int((depot.stats() or {}).get("dump_blocks_sealed", 0))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="number of prompts, default 5")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each, default 4096")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS, help="default: all")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    # HiCache asks its storage only for more tokens than 256.
    if arguments.repeats < 1 or arguments.tokens < 512:
        parser.error("needs at least one prompt of 512 tokens")
    return arguments


def measure(arguments: argparse.Namespace, progress: Progress) -> int:
    """Measures everything and prints it."""
    rows = []
    bench = Bench(arguments, progress)
    for kind in arguments.kinds:
        row = bench.row(kind)
        rows.append(row)
        progress.note(f"{row.kind}: {median(row.hit_ms):.0f} ms, {row.of_cold:.3f} of cold")
    device_ms = next((median(row.hit_ms) for row in rows if row.kind == "device"), None)

    def of_device(row: Row) -> float | None:
        return None if device_ms is None else median(row.hit_ms) / device_ms

    if arguments.json:
        facts = {"machine": machine(), "tokens": arguments.tokens}
        print(
            json.dumps(
                {**facts, "rows": [{**vars(row), "of_cold": row.of_cold, "of_device": of_device(row)} for row in rows]},
                indent=2,
            )
        )
        return 0
    print(f"{arguments.repeats} prompts of {arguments.tokens} tokens; {machine()['cores']} cores; medians")
    print(f"{'':24}{'cold, ms':>10}{'hit, ms':>10}{'of cold':>10}{'of device':>12}{'load':>8}")
    for row in rows:
        times = f"{median(row.cold_ms):10.0f}{median(row.hit_ms):10.0f}"
        ratio = of_device(row)
        shown = "" if ratio is None else f"{ratio:.3f}"
        print(f"{row.kind:24}{times}{row.of_cold:10.3f}{shown:>12}{row.load_average:8.1f}")
    return 0


def main() -> int:
    """Reads the command line and measures."""
    arguments = parse()
    return run_program(lambda progress: measure(arguments, progress), (ChildError, OSError))


if __name__ == "__main__":
    sys.exit(main())
