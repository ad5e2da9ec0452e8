"""What a worker sees of a device that hangs, on the stand-in: misses in time, and everything else goes on.

A program of its own, as ``flow.py`` is.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from flow import BLOCKS, Engine, Request

TASK_MS = 6_000
"""Time limit of a task: long enough for one that does not hang, on a busy machine."""
HANG_MS = 120_000
"""Limit against a hang of this program, not a measure of speed."""
LOADS_MAX = 5
"""Number of loads started before one must be refused."""


def hung_behind(engine: Engine) -> tuple[Request, int]:
    """A saved request, and an event that does not complete while the device hangs."""
    first = Request(engine, "")
    first.save()
    engine.device.hang(True)
    return first, engine.device.record()


def of_dumps(engine: Engine) -> dict[str, object]:
    """Observes a hanging dump, one queued behind it, a concurrent load, and closing the store."""
    first, event = hung_behind(engine)
    found: dict[str, Any] = {}
    late = [bytes([100 + index] * 16) for index in range(BLOCKS)]
    hung = engine.store.dump_pages(late, first.source, wait_event=event)
    beside = engine.store.load_pages(first.hashes, first.target)
    found["beside"] = (beside.wait_done(HANG_MS), beside.result().failures)
    found["hung"] = (hung.wait_done(HANG_MS), hung.result().failures)
    behind = engine.store.dump_pages([bytes([200] * 16)], first.source[:1])
    found["behind"] = (behind.wait_done(HANG_MS), behind.result().failures)
    found["half there"] = int(engine.store.lookup(late).sum())
    found["counted"] = engine.depot.stats()["failures"]["dump"]
    found["closed"] = [engine.store.close(0)]
    engine.device.hang(False)
    found["closed"].append(engine.store.close(HANG_MS))
    engine.close()
    engine.device.synchronize()
    found["violations"] = engine.device.violations()
    return found


def of_loads(engine: Engine) -> dict[str, object]:
    """Observes a hanging load, loads queued behind it, a concurrent dump, and closing the store."""
    first, event = hung_behind(engine)
    found: dict[str, object] = {}
    hung = [engine.store.load_pages(first.hashes, first.target, wait_event=event)]
    beside = engine.store.dump_pages([bytes([200] * 16)], first.source[:1])
    found["beside"] = (beside.wait_done(HANG_MS), beside.result().failures)
    for _ in range(LOADS_MAX):
        hung[0].wait_done(TASK_MS)
        behind = engine.store.load_pages(first.hashes, first.target, wait_event=event)
        if behind.wait_done(TASK_MS):
            found["behind"] = behind.result().failures
            break
        hung.append(behind)
    # On a busy machine one that was refused may have said so only after the wait for it.
    ended = [task for task in hung if task.done()]
    found["first ended"] = hung[0].done()
    found["said before the device was through"] = [task.result().failures for task in ended]
    hung = [task for task in hung if task not in ended]
    engine.close()
    engine.device.hang(False)
    found["hung"] = [task.wait_done(HANG_MS) and task.result().failures for task in hung]
    engine.device.synchronize()
    found["violations"] = engine.device.violations()
    return found


def main() -> None:
    """Prints the observations as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("direction", choices=("dump", "load"))
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--layerwise", action="store_true")
    arguments = parser.parse_args()
    engine = Engine(arguments.library, 0, 1, arguments.engine, arguments.layerwise, TASK_MS)
    print(json.dumps((of_dumps if arguments.direction == "dump" else of_loads)(engine)))
    sys.stdout.flush()
    # Modules are torn down in an order that a driver's threads cannot rely on.
    os._exit(0)


if __name__ == "__main__":
    main()
