"""Makes loads of the real core fail, in every Python process that has this directory in its path.

The file named by ``KVDEPOT_SABOTAGE`` says how; without it nothing happens. ``fail_load_every``: every n-th block is
requested from the depot under an unknown hash, so the depot itself reports a miss. ``kill_depot_at_load``: the depot at
``socket`` is killed between the n-th claim and its load. ``rank``: on this rank only.
"""

import hashlib
import itertools
import json
import os
import signal
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

MODULE = "kvdepot.engines.vllm.stores"


def orders():
    try:
        with open(os.environ["KVDEPOT_SABOTAGE"], encoding="utf-8") as file:
            found = json.load(file)
    except (KeyError, FileNotFoundError):
        return {}
    from torch import distributed

    rank = distributed.get_rank() if distributed.is_initialized() else 0
    return found if found.get("rank", rank) == rank else {}


def kill_depot(socket):
    from kvdepot import _native

    depot = _native.Depot.connect(socket, None, wait_ms=30_000, call_timeout_ms=30_000)
    os.kill(json.loads(depot.stats_json())["depot"]["pid"], signal.SIGKILL)
    depot.close()


def sabotage(module):
    load = module.GroupStore.load
    blocks_seen, loads_seen = itertools.count(1), itertools.count(1)

    def sabotaged(self, blocks, after, patience_ms=None):
        order = orders()
        # Counted from the order on: the self-test at the engine's start also loads.
        if (at := order.get("kill_depot_at_load")) and at == next(loads_seen):
            kill_depot(order["socket"])
        if every := order.get("fail_load_every"):
            hashes = [h if next(blocks_seen) % every else hashlib.sha256(h).digest() for h in blocks.hashes]
            blocks = module.Blocks(hashes, blocks.pages)
        return load(self, blocks, after, patience_ms)

    module.GroupStore.load = sabotaged


class Saboteur(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname != MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def execute_and_sabotage(module):
            execute(module)
            sabotage(module)

        spec.loader.exec_module = execute_and_sabotage
        return spec


sys.meta_path.insert(0, Saboteur())
