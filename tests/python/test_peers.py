"""`make bench-peers`: every wrong byte is found, ratios are of one round, and a missing peer is no failure."""

import json

import numpy as np
import pytest

from benches.peers.__main__ import wrong_of_ours
from benches.peers.comparison import Comparison, Outcome, counted
from benches.peers.kvdepot_side import KVDepotSide
from benches.peers.lab import Environment, Place
from benches.peers.results import Metric, Results
from benches.peers.side import Program, Side
from benches.peers.work import Blocks, Shape

SHAPE = Shape(4, 3, 8)
RATE, COST = Metric("gb_s", "GB/s"), Metric("cpu_s_gb", "CPU s/GB", rate=False)


@pytest.fixture
def blocks():
    return Blocks(SHAPE, seed=1)


def test_the_bytes_of_an_epoch_are_right(blocks):
    blocks.fill(2)
    assert blocks.wrong(2) == []
    assert blocks.wrong(3) == list(range(SHAPE.blocks)), "every epoch has other bytes"
    blocks.clear()
    assert blocks.wrong(2) == list(range(SHAPE.blocks))


@pytest.mark.parametrize("shard", range(SHAPE.shards))
def test_one_wrong_byte_is_found(blocks, shard):
    blocks.fill(2)
    blocks.memory[shard, 5, -1] ^= 1
    assert blocks.wrong(2) == [5]


def test_swapped_blocks_are_found(blocks):
    blocks.fill(2)
    blocks.memory[:, [1, 6]] = blocks.memory[:, [6, 1]]
    assert blocks.wrong(2) == [1, 6]


def test_addresses_are_those_of_the_shards(blocks):
    for block, shard in ((0, 0), (5, 2), (7, 1)):
        assert blocks.addresses()[block, shard] == blocks.memory[shard, block].ctypes.data


def test_names_are_distinct(blocks):
    names = [*blocks.hashes(1), *blocks.hashes(2)]
    assert len(set(names)) == len(names)
    assert blocks.hashes(1, 3) == blocks.hashes(1)[:3]


class Remembering(Side):
    """A store that returns ``damaged`` blocks with a wrong byte, and says of ``lost`` ones that they did not arrive."""

    damaged: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()

    def open(self, settings):
        self.kept = {}

    def dump(self, hashes):
        self.kept |= {name: self.blocks.memory[:, index].copy() for index, name in enumerate(hashes)}

    def persist(self):
        pass

    def load(self, hashes):
        return [page for page, name in enumerate(hashes) if not self.load_one(name, page)]

    def load_one(self, name, page):
        if page not in self.lost:
            self.blocks.memory[:, page] = self.kept[name]
        self.blocks.memory[0, page, 7] ^= page in self.damaged
        return page not in self.lost

    def lookup(self, hashes):
        return sum(name in self.kept for name in hashes)


def asked(side, *requests):
    program = Program(side)
    program.answer({"op": "open", "shape": [4, 3, 8], "seed": 1, "settings": {}})
    return [program.answer(request) for request in requests]


def test_wrong_blocks_are_counted_and_lost_ones_apart():
    side = Remembering()
    side.damaged, side.lost = (1, 4), (6,)
    _, load, hit = asked(side, *({"op": op, "epoch": 2} for op in ("dump", "load", "hit")))
    for found in (load, hit):
        assert (found["wrong"], found["failed"], found["loaded"]) == (2, 1, 8)


def test_a_lookup_that_finds_another_number_is_an_error():
    side = Remembering()
    asked(side, {"op": "dump", "epoch": 2}, {"op": "lookup", "epoch": 2, "there": True})
    with pytest.raises(RuntimeError, match="finds 0"):
        asked(side, {"op": "lookup", "epoch": 2, "there": True})


def test_our_side_stores_restores_and_loads(tmp_path):
    settings = {"pipeline": "Cache|Posix", "directories": [str(tmp_path)], "pool_gb": 0.0625}
    first, second = Program(KVDepotSide()), Program(KVDepotSide())
    opened = {"op": "open", "shape": [4, 3, 8], "seed": 1, "settings": settings}
    first.answer(opened)
    assert first.answer({"op": "dump", "epoch": 2})["persisted_s"] > 0
    second.answer(opened)
    assert second.answer({"op": "lookup", "epoch": 2, "there": True})["p50_us"] > 0
    second.answer({"op": "lookup", "epoch": 2, "there": False})
    second.answer({"op": "restore", "epoch": 2})
    load = second.answer({"op": "load", "epoch": 2})
    hit = second.answer({"op": "hit", "epoch": 2})
    assert all((found["wrong"], found["failed"]) == (0, 0) for found in (load, hit))
    assert hit["p50_us"] > 0
    with pytest.raises(RuntimeError, match="0 of 8 blocks were restored"):
        second.answer({"op": "restore", "epoch": 3})


def results(wrong="", **samples):
    found = Results("title", (RATE, COST), peers=("theirs", "others"), beside={"ours": "ours too"})
    for side, rounds in samples.items():
        for rate, cost in rounds:
            found.add(
                "case", side, {"gb_s": rate, "cpu_s_gb": cost}, {"wrong": 3 * (side == wrong), "failed": 0, "loaded": 8}
            )
    return found


def test_a_ratio_is_of_one_round_and_to_the_best_peer():
    found = results(ours=[(4, 1), (6, 1), (8, 2)], theirs=[(2, 2), (3, 4), (1, 8)], others=[(1, 3), (12, 2), (2, 4)])
    assert found.of_best_peer("case", "ours", RATE) == 2.0, "of 4 / 2, 6 / 12 and 8 / 2"
    assert found.of_best_peer("case", "ours", COST) == 2.0, "of 2 / 1, 2 / 1 and 4 / 2: less is better"
    assert found.of_best_peer("case", "theirs", RATE) is None
    assert results(ours=[(4, 1)]).of_best_peer("case", "ours", RATE) is None, "no peer is there"


def test_two_sides_of_ours_are_compared_as_well(capsys):
    found = results(**{"ours": [(4, 1), (6, 1), (8, 2)], "ours too": [(2, 2), (3, 4), (1, 8)], "theirs": [(1, 1)] * 3})
    assert found.of_other("case", "ours", RATE) == 2.0, "of 4 / 2, 6 / 3 and 8 / 1"
    assert found.of_other("case", "ours too", RATE) is None
    ours, other, theirs = found.rows()
    assert (ours["of_other"], other["of_other"], theirs["of_other"]) == ({"gb_s": 2.0, "cpu_s_gb": 4.0}, {}, {})
    found.print()
    assert "times ours too" in capsys.readouterr().out


def test_a_time_of_nothing_is_no_division_by_zero():
    assert results(ours=[(4, 0)], theirs=[(2, 0)]).of_best_peer("case", "ours", COST) == 1.0


def test_rows_are_json_and_a_table_is_printed(capsys):
    found = results(ours=[(4, 1), (6, 1)], theirs=[(2, 2), (3, 4)])
    ours, theirs = json.loads(json.dumps(list(found.rows())))
    assert ours["median"] == {"gb_s": 5.0, "cpu_s_gb": 1.0}
    assert ours["of_best_peer"] == {"gb_s": 2.0, "cpu_s_gb": 3.0}
    assert (ours["wrong"], ours["loaded"], theirs["of_best_peer"]) == (0, 16, {})
    found.print()
    text = capsys.readouterr().out
    assert all(part in text for part in ("title: case", "5.00 (4.00…6.00)", "2.00x", "0 of 16"))


def test_wrong_bytes_of_ours_fail_the_run_and_those_of_a_peer_are_its_own():
    rounds = {"ours": [(4, 1)], "theirs": [(2, 2)]}
    assert list(wrong_of_ours({"name": results(wrong="theirs", **rounds)})) == []
    found = results(wrong="ours", **rounds)
    assert list(wrong_of_ours({"name": found})) == ["name: case: ours loaded 3 wrong blocks"]


class Small(Comparison):
    """A comparison of which every measurement is the same."""

    name, title, metrics = "small", "small", (RATE,)
    shapes = smoke_shapes = (SHAPE,)
    ours, peers = ("ours", "ours over theirs"), ("theirs", "yardstick")
    smoke_sides = ("ours", "theirs")

    def measure(self, side, shape, round_):
        self.order.append(side)
        return Outcome({"gb_s": 1.0}, counted({"wrong": 0, "failed": 0, "loaded": 1}))


def environment(directory, probe="print('1.0')"):
    return Environment("Peer", str(directory), "peer-env", probe)


def run(tmp_path, needs, *, smoke=False):
    small = Small(Place(tmp_path, tmp_path, tmp_path))
    small.needs, small.order = needs, []
    small.run(2, smoke=smoke, note=lambda _: None)
    return small


def test_a_peer_that_is_not_installed_is_reported_and_its_sides_are_left_out(tmp_path):
    missing = environment(tmp_path / "nothing")
    small = run(tmp_path, {"ours over theirs": missing, "theirs": missing})
    assert small.left_out() == "Peer: not installed: run make peer-env"
    assert small.order == ["ours", "yardstick", "yardstick", "ours"]


def installed(tmp_path):
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/usr/bin/env")
    return tmp_path / "env"


def test_sides_take_turns_in_alternating_order(tmp_path):
    small = run(tmp_path, {})
    assert small.left_out() is None
    there = ["ours", "ours over theirs", "theirs", "yardstick"]
    assert small.order == [*there, *reversed(there)]
    assert run(tmp_path, {}, smoke=True).order == ["ours", "theirs", "theirs", "ours"]


def test_an_environment_says_why_it_cannot_be_used(tmp_path):
    directory = installed(tmp_path)
    (directory / "cannot-run").write_text("Peer needs a library\n")
    assert environment(directory).version is None
    assert environment(directory).missing == "Peer needs a library"
    (directory / "cannot-run").unlink()
    broken = environment(directory)
    assert broken.version is None
    assert broken.missing.startswith("cannot be imported: ")


def test_shapes_have_names():
    assert str(Shape(256, 32, 64)) == "32 x 256 KiB x 64"
    assert str(Shape(2048, 1, 256)) == "1 x 2 MiB x 256"
    assert Shape(2048, 1, 256).bytes == 512 << 20
    assert np.prod(Blocks(SHAPE, 1).memory.shape) == SHAPE.bytes
