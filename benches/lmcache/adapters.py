"""LMCache's own benchmark of second levels, ``lmcache bench l2``: objects stored, looked up in vain, and loaded.

No engine and no server run: LMCache's benchmark calls the level's adapter itself. It compares the bytes of the last
repetition's objects, and fails if any differ.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from benches.lmcache.levels import DRAIN_S, LEVELS, Level, Place, Sizes
from benches.peers.results import Metric, Results
from benches.peers.work import MIB
from tools.lab.child import Child, ChildError

RUN_S = 900.0
REPETITIONS = 5
"""Of LMCache's benchmark, in one process, after one that warms up."""
METRICS = (
    Metric("store_ms", "store ms", 1, rate=False),
    Metric("load_ms", "load ms", 1, rate=False),
    Metric("absent_ms", "lookup, absent ms", 1, rate=False),
)
SHAPES = ("128x256", "32x1024", "16x8192")
LEFT_OUT = {
    "lmcache-dax": "LMCache's dax asks for the shapes of objects, and LMCache's benchmark gives them none (0.5.6)",
}
"""Levels that ``lmcache bench l2`` cannot run."""
OPERATIONS = {"Store": "store_ms", "Load": "load_ms", "Lookup": "absent_ms"}

Step = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Objects:
    """Objects of one call of an adapter.

    Attributes:
        count: number of objects.
        kib: size of each in KiB.
    """

    count: int
    kib: int

    def __str__(self) -> str:
        return f"{self.count} objects of {self.kib} KiB"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses ``32x1024``: 32 objects of 1,024 KiB.

        Raises:
            ValueError: it has another form.
        """
        count, separator, kib = text.partition("x")
        if not (separator and count.isdecimal() and kib.isdecimal() and int(count) and int(kib)):
            raise ValueError(text)
        return cls(int(count), int(kib))

    @property
    def every_bytes(self) -> int:
        """Bytes of all objects of one run."""
        return (REPETITIONS + 1) * self.count * self.kib * 1024


@dataclass(frozen=True)
class Adapters:
    """The measurement.

    Attributes:
        place: where levels write.
        settings: keys of kvdepot's configuration.
        shapes: the cases.
    """

    place: Place
    settings: Mapping[str, Any]
    shapes: Sequence[Objects]

    def results(self, names: Sequence[str]) -> Results:
        """Returns an empty table of these levels."""
        peers = [LEVELS[name].title for name in names if name not in LEFT_OUT and not LEVELS[name].ours]
        return Results("lmcache bench l2", METRICS, peers)

    def round(self, names: Sequence[str], step: Step, results: Results) -> None:
        """Measures each of these levels once, in this order, and adds that to the results."""
        for objects in self.shapes:
            for name in names:
                if name in LEFT_OUT:
                    continue
                kind = LEVELS[name]
                with step(f"{kind.title}: {objects}"), kind(self.place, self._sizes(objects), self.settings) as level:
                    sample, counts = self._run(level, objects)
                results.add(str(objects), kind.title, sample, counts)
                # What one side leaves to the kernel is not written while the next one is measured.
                os.sync()

    def command(self, level: Level, objects: Objects, output: Path) -> list[str]:
        """Returns LMCache's command."""
        adapter = level.adapter()
        if level.ours:
            # LMCache's benchmark has no weights, and objects of bytes.
            adapter["adapter_params"]["weights_version"] = "bench-fp8_e4m3"
        options = {
            "l2-adapter": json.dumps(adapter),
            "num-keys": objects.count,
            "data-size-kb": objects.kib,
            "rounds": REPETITIONS,
            "format": "json",
            "output": output,
        }
        words = [str(Path(sys.executable).parent / "lmcache"), "bench", "l2", "--no-skip-verify", "--quiet"]
        for name, value in options.items():
            words += [f"--{name}", str(value)]
        return words

    def _sizes(self, objects: Objects) -> Sizes:
        """Space for everything on a medium, and in a pool that refuses dumps while too much of it is not written."""
        return Sizes(0, 2 * objects.every_bytes + 64 * MIB, 2 * objects.every_bytes + 64 * MIB, objects.kib * 1024)

    def _run(self, level: Level, objects: Objects) -> tuple[dict[str, float], dict[str, int]]:
        output = level.root / "bench.json"
        command = self.command(level, objects, output)
        self.place.note("l2", level.title, command)
        with level.start() as depot:
            with Child("lmcache bench", command, level.root / "bench.log", {"LMCACHE_TRACK_USAGE": "false"}) as bench:
                bench.wait(RUN_S)
            if depot:
                depot.wait_until_clean(DRAIN_S)
        return read_report(json.loads(output.read_text()), bench.tail())


def read_report(report: Mapping[str, Any], log: str) -> tuple[dict[str, float], dict[str, int]]:
    """Returns the medians of LMCache's report, and how many objects did not come back.

    Raises:
        ChildError: an object was not stored, or one was found that nobody stored.
    """
    done = {one["operation"]: one for name, one in report["metrics"].items() if name.startswith("op_")}
    missing = OPERATIONS.keys() - done.keys()
    if missing:
        raise ChildError(f"lmcache bench l2 did not report {', '.join(sorted(missing))}\n{log}")
    stored, found = done["Store"], done["Lookup"]["total_success"]
    if stored["total_success"] != stored["total_keys"] or found:
        raise ChildError(
            f"{stored['total_success']} of {stored['total_keys']} objects were stored, and {found} found in vain\n{log}"
        )
    loaded = done["Load"]
    # Wrong bytes make the benchmark fail.
    counts = {"failed": loaded["total_keys"] - loaded["total_success"]}
    return {name: done[operation]["duration_p50_ms"] for operation, name in OPERATIONS.items()}, counts
