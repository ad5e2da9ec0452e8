"""``kvdepot trace fleet``: options are read, and what is printed is what was simulated."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvdepot.cli import main
from kvdepot.errors import ConfigError
from kvdepot.traces.files import line_of, read_traces
from kvdepot.traces.fleet import ROUTES, Fleet, change_at, together, upgrades
from kvdepot.traces.generate import generate
from kvdepot.traces.sizes import Tier
from kvdepot.traces.sweep import Sweep

REQUESTS = 600


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    lines = [line_of(one) for one in generate("chat", requests=REQUESTS, seed=4, per_second=3)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def run(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(main, ["trace", "fleet", *words])
    assert result.exit_code == status, result.output
    return result.output


def test_one_node_hits_what_a_replay_hits(file: str) -> None:
    trace, _ = read_traces([file])
    tier = Tier(900, "lru", "second_use")
    (point,) = Sweep(["s3fifo"], [300], [tier]).points(trace)
    for route in ROUTES:
        parts = Fleet(nodes=1, pool=300, policy="s3fifo", tiers=[tier], windows=7).simulate(trace, route)
        whole = together(parts)
        assert len(parts) == 7
        assert whole.hit == pytest.approx(point.hit)
        assert whole.written == point.written
        assert whole.busiest == pytest.approx(1.0, abs=0.02)


def test_all_options_reach_the_simulation(file: str) -> None:
    words = [file, "--nodes", "4", "--capacity", "1GB", "--policy", "lru", "--tier", "2GB:cold", "--servers", "3"]
    words += ["--shared", "1GB:second_use:lru", "--route", "longest_prefix", "--copies", "2", "--block-mib", "8"]
    words += ["--lose-node", "1@40", "--add-node", "1@60%", "--add-node", "4@70", "--lose-server", "0@20"]
    words += ["--engines", "3", "--engine-capacity", "0.5GB", "--reset", "1@80"]
    words += ["--add-server", "0@50", "--upgrade", "10-30", "--take-over", "--windows", "10", "--seed", "5"]
    found = json.loads(run(*words, "--json"))
    assert (found["requests"], found["levels"]) == (2 * REQUESTS, ["pool", "tier 1", "servers"])
    (parts,) = found["routes"].values()
    assert [part["nodes"] for part in parts] == [4, 4, 4, 4, 3, 3, 4, 5, 5, 5]
    trace, _ = read_traces([file])
    changes = [*upgrades("10-30", 4, takes_over=True), change_at("lose_node", "1@40"), change_at("add_node", "1@60")]
    changes += [
        change_at("reset", "1@80"),
        change_at("add_node", "4@70"),
        change_at("lose_server", "0@20"),
        change_at("add_server", "0@50"),
    ]
    fleet = Fleet(
        nodes=4,
        pool=128,
        policy="lru",
        tiers=[Tier(256, "lru", "cold")],
        engines=3,
        engine_capacity=64,
        servers=3,
        shared=Tier(128, "lru", "second_use"),
        copies=2,
        changes=sorted(changes, key=lambda change: change[0]),
        windows=10,
        seed=5,
    )
    expected = fleet.simulate(trace, "longest_prefix")
    assert [tuple(part["hits"]) for part in parts] == [part.hits for part in expected]
    assert [tuple(part["written"]) for part in parts] == [part.written for part in expected]
    assert [part["engine_hits"] for part in parts] == [part.engine_hits for part in expected]
    assert all(part.engine_hits for part in expected)


def test_the_table_has_a_row_for_each_route_and_bars_for_each_part(file: str) -> None:
    printed = run(file, "--nodes", "2", "--capacity", "500", "--servers", "1", "--shared", "5000", "--plot")
    for route in ROUTES:
        assert printed.count(route) == 2
    assert "blocks from servers" in printed
    assert printed.count(" 2 nodes ") == 3 * 20
    assert "engines %" not in printed
    assert "engines %" in run(file, "--capacity", "500", "--engine-capacity", "100")
    assert "GiB to servers" in run(file, "--capacity", "1GB", "--block-mib", "1", "--servers", "1", "--shared", "1GB")


def test_an_upgrade_with_a_take_over_costs_nothing(file: str) -> None:
    def hit(*more: str) -> float:
        words = [file, "--nodes", "2", "--capacity", "5000", "--route", "longest_prefix", "--windows", "1", "--json"]
        (part,) = json.loads(run(*words, *more))["routes"]["longest_prefix"]
        return float(part["hit"])

    assert hit("--upgrade", "20-80", "--take-over") == hit() > hit("--upgrade", "20-80")


def test_engines_with_caches_of_their_own_leave_the_depot_the_rest(file: str) -> None:
    def part(*more: str) -> dict[str, int | float | list[int]]:
        words = [file, "--nodes", "1", "--capacity", "100000", "--route", "round_robin", "--windows", "1", "--json"]
        (found,) = json.loads(run(*words, *more))["routes"]["round_robin"]
        assert isinstance(found, dict)
        return found

    alone, shared = part(), part("--engines", "4", "--engine-capacity", "300")
    assert alone["hit"] == shared["hit"]
    assert shared["engine_hits"]
    assert shared["hits"] != alone["hits"]


def test_a_reset_shows_in_the_part_after_it(file: str) -> None:
    words = [file, "--nodes", "1", "--capacity", "100000", "--route", "round_robin", "--windows", "4", "--json"]
    hits = [
        [part["hit"] for part in json.loads(run(*words, *more))["routes"]["round_robin"]]
        for more in ([], ["--reset", "0@50"])
    ]
    assert hits[0][:2] == hits[1][:2]
    assert hits[1][2] < hits[0][2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--route", "nearest"], "--route nearest: known are random"),
        (["--policy", "belady"], "--policy belady: known are"),
        (["--servers", "2"], "--servers and --shared belong together"),
        (["--shared", "5000"], "--servers and --shared belong together"),
        (["--take-over"], "--upgrade, too"),
        (["--upgrade", "80-20"], "--upgrade '80-20': write FROM-TO"),
        (["--upgrade", "half"], "write FROM-TO"),
        (["--lose-node", "first"], "--lose-node 'first': write NUMBER@PERCENT"),
        (["--add-server", "1@101"], "--add-server '1@101'"),
        (["--lose-node", "9@50"], "no such node"),
        (["--lose-node", "9@100"], "no such node"),
        (["--add-node", "1@50"], "up already"),
        (["--reset", "1@50"], "no such tenant"),
        (["--reset", "all"], "--reset 'all': write NUMBER@PERCENT"),
        (["--engine-capacity", "2GB"], "--block-mib"),
        (["--lose-server", "0@50"], "no such pool server"),
        (["--nodes", "1", "--lose-node", "0@50"], "a node that is up"),
    ],
)
def test_wrong_options_are_reported(file: str, words: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["trace", "fleet", file, "--capacity", "100", *words])
    shown = result.output + str(result.exception or "")
    assert result.exit_code != 0
    assert said in shown


def test_an_upgrade_restarts_every_node_once() -> None:
    assert list(upgrades("50-100%", 2, takes_over=False)) == [(0.5, {"upgrade": 0}), (0.75, {"upgrade": 1})]
    with pytest.raises(ConfigError):
        list(upgrades("50", 2, takes_over=False))
