"""``kvdepot bench store``: the arguments it passes to the core, and that they cannot be confused."""

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvdepot import _native
from kvdepot.bench import disk, memory, served, traces
from kvdepot.bench.shapes import SMOKE_SHAPES

STUB = Path(_native.__file__).with_name("_native.pyi")
TASK_MS_MIN = 30_000


class SpyDepot:
    """A depot that records the arguments of ``store``."""

    def __init__(self, depot, stores):
        self._depot, self._stores = depot, stores

    def __getattr__(self, name):
        return getattr(self._depot, name)

    def store(self, namespace, **arguments):
        self._stores.append(arguments)
        return self._depot.store(namespace, **arguments)


@pytest.fixture
def stores(monkeypatch):
    """Returns the arguments of each store that a benchmark opens."""
    noted = []

    class Depot:
        @staticmethod
        def embedded(config):
            return SpyDepot(_native.Depot.embedded(config), noted)

        @staticmethod
        def connect(*arguments, **named):
            return SpyDepot(_native.Depot.connect(*arguments, **named), noted)

    for module in (memory, disk, served):
        monkeypatch.setattr(module, "_native", SimpleNamespace(Depot=Depot, Task=_native.Task, Store=_native.Store))
    return noted


def copy_threads(stores):
    assert stores
    assert all(one["timeout_ms"] >= TASK_MS_MIN for one in stores), stores
    return {json.loads(one["copy_json"])["copy_threads"] for one in stores}


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_are_threads_and_no_time_out(stores, threads):
    rows = list(memory.warm(SMOKE_SHAPES, rounds=1, threads=threads))
    assert len(rows) == len(SMOKE_SHAPES)
    assert copy_threads(stores) == {threads}


def test_the_door_has_time(stores):
    assert memory.door(rounds=1, keys=200)["keys_per_s"] > 0
    assert copy_threads(stores) == {1}


def test_cold_loads_have_time(stores, tmp_path):
    rows = list(disk.cold(SMOKE_SHAPES, str(tmp_path), rounds=1, threads=2))
    assert [row["threads"] for row in rows] == [2] * len(rows)
    assert copy_threads(stores) == {1}


def test_what_traces_cost_is_told_for_each_block():
    row = traces.cost(rounds=1, shape=traces.SMOKE_SHAPE, requests=2, scrapes=2)
    assert row["block_kib"] == 4
    assert all(row[name] > 0 for name in ("dump_and_load_us_block", "trace_percent", "lite_percent", "metrics_percent"))
    parts = [row[f"{part}_percent"] for part in ("trace", "lite", "metrics")]
    assert row["all_percent"] == pytest.approx(sum(parts)), "one round: its sum is the sum of its parts"


def test_a_round_costs_as_many_scrapes_as_it_has_seconds():
    spent = traces.Spent
    done = [
        traces.Round(spent(2.0, 4.0), spent(0.002, 0.004), spent(0.004, 0.008), spent(0.001, 0.002)),
        traces.Round(spent(8.0, 4.0), spent(0.0, 0.0), spent(0.0, 0.0), spent(0.01, 0.01)),
        traces.Round(spent(1.0, 1.0), spent(0.0, 0.0), spent(0.0, 0.0), spent(0.0, 0.0)),
    ]
    row = traces.row(done[:1], traces.SMOKE_SHAPE, 1)
    assert (row["trace_percent"], row["lite_percent"]) == pytest.approx((0.1, 0.2))
    assert (row["metrics_percent"], row["all_percent"]) == pytest.approx((0.1, 0.4))
    assert (row["metrics_cpu_percent"], row["all_cpu_percent"]) == pytest.approx((0.1, 0.4))
    assert row["scrape_ms"] == pytest.approx(1.0)
    row = traces.row(done, traces.SMOKE_SHAPE, 1)
    assert row["metrics_percent"] == pytest.approx(0.1), "the median of the rounds' own ratios"


def functions():
    tree = ast.parse(STUB.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def is_int(argument):
    return argument.annotation is not None and "int" in ast.unparse(argument.annotation).split(" | ")


@pytest.mark.parametrize("function", functions(), ids=lambda function: f"{function.name}:{function.lineno}")
def test_no_number_of_the_core_can_be_taken_for_another(function):
    """An optional integer, or one next to another integer, is keyword-only."""
    positional = [one for one in function.args.args if one.arg != "self"]
    integers = [one.arg for one in positional if is_int(one)]
    assert len(integers) <= 1, integers
    defaulted = positional[len(positional) - len(function.args.defaults) :]
    optional = [one.arg for one in defaulted if is_int(one)]
    assert not optional or len(positional) == 1, optional
