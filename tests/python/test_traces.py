"""Traces: what is read, and that a replay counts the same as an independent model."""

import gzip
import json
import os
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvdepot.cli import main
from kvdepot.depot import open_store
from kvdepot.errors import ConfigError
from kvdepot.traces.files import line_of, read_traces, recorded_name
from kvdepot.traces.generate import FAMILIES, generate
from kvdepot.traces.play import CHUNK_BLOCKS, Client, play
from kvdepot.traces.sizes import Tier, blocks_of, tier_of
from kvdepot.traces.sweep import POLICIES, Sweep

CONVERSATIONS = os.environ.get("KVDEPOT_TEST_TRACE", "")
"""Mooncake's public trace of conversations (``conversation_trace.jsonl``), which is not part of this project."""
PUBLISHED_LRU = {5_000: 11.0, 10_000: 21.1, 20_000: 28.7, 50_000: 35.5}
PUBLISHED_BELADY = {5_000: 34.1, 10_000: 36.6, 20_000: 36.6, 50_000: 36.6}
"""Percent of all blocks named, by blocks of capacity; computed by others, with their own code."""
PUBLISHED_WITHIN = 0.2
LHD_LOSES = {"agents": 0.0, "chat": 0.16, "documents": 0.0, "scan": 0.0}
LHD_LOSES_ON_SHORT_TRACES = {"agents": 0.35, "chat": 0.3, "documents": 0.7, "scan": 1.3}
"""Points that LHD hits less than the better of LRU and S3-FIFO at most; docs/benchmarks.md has the figures."""


def lru(requests: list[list[int]], capacity: int) -> int:
    """Returns blocks of hits, by Python's own ordered dictionary."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in requests:
        hit = 0
        while hit < len(blocks) and blocks[hit] in held:
            hit += 1
        hits += hit
        for index, block in enumerate(blocks):
            if block not in held:
                held[block] = None
                if len(held) > capacity:
                    held.popitem(last=False)
            elif index < hit:
                held.move_to_end(block)
    return hits


def written(path: Path, family: str, requests: int = 400, seed: int = 1) -> str:
    lines = [line_of(one) for one in generate(family, requests=requests, seed=seed, per_second=3)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def run(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(main, ["trace", *words])
    assert result.exit_code == status, result.output
    return result.output


def test_a_file_that_cannot_be_written_is_an_error_with_its_path(tmp_path):
    file, nowhere = written(tmp_path / "trace.jsonl", "chat", requests=2), str(tmp_path / "missing" / "out.jsonl")
    for words in (("generate", "chat", "--requests", "2"), ("convert", file)):
        said = run(*words, "--output", nowhere, status=1)
        assert said.startswith(f"error: {nowhere}: cannot be written: No such file or directory: name a file")
    said = run("generate", "chat", "--requests", "2", "--output", "/dev/full", status=1)
    assert said.startswith("error: /dev/full: cannot be written: No space left")


def test_wrong_blocks_are_an_error_like_others(tmp_path, monkeypatch):
    file = written(tmp_path / "trace.jsonl", "chat", requests=2)
    played = SimpleNamespace(wrong=3, json=lambda _: {"wrong_blocks": 3})
    monkeypatch.setattr("kvdepot.traces.play.play", lambda *_, **__: played)
    assert "error: 3 blocks held other bytes" in run("play", file, "--block-kib", "4", status=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_replays_hit_what_the_model_hits(tmp_path, family):
    file = written(tmp_path / "trace.jsonl", family)
    trace, notes = read_traces([file])
    rows = [blocks for *_, blocks in trace.requests()]
    assert notes == []
    assert trace.counts() == (400, sum(map(len, rows)), len({block for row in rows for block in row}))
    for capacity in (50, 700, 3000):
        (point,) = Sweep(["lru"], [capacity]).points(trace)
        assert point.hit == lru(rows, capacity) / sum(map(len, rows))


@pytest.fixture(scope="module")
def conversations() -> tuple[list[list[int]], Any]:
    """The blocks of each request, and the same as a trace."""
    if not CONVERSATIONS:
        pytest.skip("KVDEPOT_TEST_TRACE does not name Mooncake's conversation_trace.jsonl")
    rows = [json.loads(line)["hash_ids"] for line in Path(CONVERSATIONS).read_text().splitlines()]
    return rows, read_traces([CONVERSATIONS])[0]


def test_a_real_trace_is_complete(conversations):
    _, trace = conversations
    assert trace.counts() == (12_031, 288_500, 182_790)


def percent(trace: Any, policy: str, capacity: int) -> float:
    (point,) = Sweep([policy], [capacity]).points(trace)
    return 100 * float(point.hit)


@pytest.mark.parametrize("capacity", PUBLISHED_LRU)
def test_lru_on_a_real_trace_hits_what_the_model_and_others_hit(conversations, capacity):
    rows, trace = conversations
    found = percent(trace, "lru", capacity)
    assert found == pytest.approx(100 * lru(rows, capacity) / sum(map(len, rows)), abs=1e-9)
    assert found == pytest.approx(PUBLISHED_LRU[capacity], abs=PUBLISHED_WITHIN)


@pytest.mark.parametrize("capacity", PUBLISHED_BELADY)
def test_belady_on_a_real_trace_hits_what_others_found(conversations, capacity):
    """The Rust tests compare it with a model, and with every choice of evictions, on generated traces."""
    found = percent(conversations[1], "belady", capacity)
    assert found == pytest.approx(PUBLISHED_BELADY[capacity], abs=PUBLISHED_WITHIN)


@pytest.mark.parametrize("capacity", [1_000, *PUBLISHED_LRU])
def test_the_default_policy_hits_most_on_a_real_trace(conversations, capacity):
    trace = conversations[1]
    lhd, best = percent(trace, "lhd", capacity), max(percent(trace, one, capacity) for one in ("lru", "s3fifo"))
    assert best - 0.01 < lhd <= percent(trace, "belady", capacity)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_makes_one_trace_in_the_order_of_time(family):
    one, again, other = (list(generate(family, requests=200, seed=seed, per_second=5)) for seed in (7, 7, 8))
    assert one == again != other
    assert all(left[0] <= right[0] for left, right in pairwise(one))
    assert all(row[1] // 512 == len(row[3]) for row in one)
    # Some blocks recur, and some do not.
    blocks = [block for row in one for block in row[3]]
    assert 0 < len(set(blocks)) < len(blocks)
    # A block always follows the same one, so hits are a prefix.
    before: dict[int, int] = {}
    assert all(before.setdefault(b, a) == a for row in one for a, b in pairwise(row[3]))


def losses_of_lhd(tmp_path: Path, family: str, requests: int, seeds: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    """Returns by how many points LHD hits less than the better of LRU and S3-FIFO, by seed and size."""
    found = {}
    for seed in seeds:
        trace, _ = read_traces([written(tmp_path / f"{seed}.jsonl", family, requests, seed)])
        for blocks in sizes:
            lhd = percent(trace, "lhd", blocks)
            assert lhd <= percent(trace, "belady", blocks)
            found[seed, blocks] = max(percent(trace, one, blocks) for one in ("lru", "s3fifo")) - lhd
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_lhd_loses_at_most_a_sixth_of_a_point_to_lru_and_s3fifo(tmp_path, family):
    """And only on conversations."""
    found = losses_of_lhd(tmp_path, family, 10_000, (0, 3, 12), (1000, 2000, 5000))
    assert max(found.values()) <= LHD_LOSES[family] + 1e-9, found
    assert min(found.values()) < 0, "there is nothing to be gained"


@pytest.mark.parametrize("family", FAMILIES)
def test_lhd_loses_at_most_a_point_and_a_third_before_it_has_learned(tmp_path, family):
    found = losses_of_lhd(tmp_path, family, 3000, (1, 2, 4, 7, 8), (500, 2000))
    assert max(found.values()) <= LHD_LOSES_ON_SHORT_TRACES[family], found


def test_a_replay_prints_a_table_bars_and_json(tmp_path):
    file = written(tmp_path / "trace.jsonl", "chat")
    text = run("replay", file, "--capacity", "100,1000", "--plot")
    assert "400 requests" in text
    assert all(policy in text for policy in (*POLICIES, "belady", "endless", "█"))
    found = json.loads(run("replay", file, "--capacity", "100", "--policy", "lru", "--block-mib", "4", "--json"))
    (point,) = found["points"]
    assert (point["blocks"], point["bytes"], point["policy"]) == (100, 100 * (4 << 20), "lru")
    assert 0 < point["hit"] < found["ceiling"] < 1
    by_default = json.loads(run("replay", file, "--json"))
    assert len(by_default["points"]) == 6 * (len(POLICIES) + 1)
    assert by_default["points"][-1]["hit"] == pytest.approx(by_default["ceiling"])


def test_more_of_each_level_is_told_apart(tmp_path):
    file = written(tmp_path / "trace.jsonl", "documents")
    words = ["--capacity", "1000", "--policy", "lru", "--tier", "4000", "--more", "16GB", "--block-mib", "8"]
    (point,) = json.loads(run("replay", file, *words, "--json"))["points"]
    trace, _ = read_traces([file])
    for level, sizes in enumerate([(1000 + 2048, 4000), (1000, 4000 + 2048)]):
        (grown,) = Sweep(["lru"], [sizes[0]], [Tier(sizes[1], "lru", "through")]).points(trace)
        assert point["more"][level] == pytest.approx(grown.hit - point["hit"])
    assert point["more"][1] > 0
    text = run("replay", file, *words)
    assert all(word in text for word in ("pool %", "tier 1 %", "writes to tier 1", "16GB more tier 1"))


def test_a_budget_of_written_bytes_costs_hits(tmp_path):
    file = written(tmp_path / "trace.jsonl", "documents")

    def point(tier: str, *words: str) -> dict[str, Any]:
        return json.loads(run("replay", file, "--policy", "lru", "--tier", tier, *words, "--json"))["points"][0]

    pool = ("--capacity", "100")
    free, limited = point("100000", *pool), point("100000:::2400", *pool)
    assert free["over_budget"] == [0, 0]
    assert limited["over_budget"][1] > 0
    assert 0 < limited["written"][1] < free["written"][1]
    assert 0 < limited["hit"] < free["hit"]
    assert "over budget of tier 1" in run("replay", file, *pool, "--tier", "100000:::2400")


def test_a_pool_that_keeps_nothing_is_replayed(tmp_path):
    file = written(tmp_path / "trace.jsonl", "documents")
    found = json.loads(run("replay", file, "--keeps-nothing", "--tier", "100000:second_use", "--json"))
    (point,) = found["points"]
    assert point["hit"] == pytest.approx(found["ceiling"]), "every block goes to the tier, which has room for all"
    assert point["levels"][0] == 0
    assert "writes to tier 1" in run("replay", file, "--keeps-nothing", "--tier", "100000", "--more", "5")


def test_recordings_keep_the_time_between_them(tmp_path):
    for begin, process, number in ((5_000, 1, 1), (5_000, 1, 2), (9_000, 2, 1)):
        name = f"trace-{recorded_name(begin, process)}.{number:06}.jsonl"
        (tmp_path / name).write_text(line_of((number, 32, 1, [begin, number])) + "\n")
    trace, _ = read_traces(map(str, tmp_path.iterdir()))
    assert [row[0] for row in trace.requests()] == [1, 2, 4001]


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path):
    file = tmp_path / "trace.jsonl"
    whole = line_of((1, 512, 1, [1]))
    file.write_text(f"{whole}\n\n{whole[:20]}")
    trace, notes = read_traces([str(file)])
    assert trace.counts()[0] == 1
    assert notes == [f"{file}:3: an incomplete last line was skipped"]
    file.write_text(f"{whole[:20]}\n{whole}\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:1: "):
        read_traces([str(file)])


def test_sessions_and_packed_files_are_read(tmp_path):
    session = {"id": "s", "block_size": 64, "requests": [{"t": 1.5, "in": 128, "out": 3, "hash_ids": [0, 1]}]}
    (tmp_path / "a.json").write_text(json.dumps(session, indent=1))
    (tmp_path / "b.json").write_text(json.dumps({**session, "id": "t"}))
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write(line_of((7, 512, 1, [0])) + "\n")
    trace, _ = read_traces(str(path) for path in sorted(tmp_path.iterdir()))
    assert [row[0] for row in trace.requests()] == [7, 1500, 1500]
    assert trace.counts() == (3, 5, 5)


def test_a_converted_trace_tells_the_same_and_no_hashes(tmp_path):
    file = tmp_path / "trace.jsonl"
    hashes = [os.urandom(16).hex() for _ in range(3)]
    lines = [{"timestamp": 40, "input_length": 48, "output_length": 1, "block_tokens": 16, "hash_ids": hashes}]
    lines.append({**lines[0], "timestamp": 90, "hash_ids": hashes[:2]})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    target = tmp_path / "converted.jsonl"
    assert "2 requests" in run("convert", str(file), "--output", str(target))
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(row["timestamp"], row["hash_ids"]) for row in rows] == [(0, [0, 1, 2]), (50, [0, 1])]
    assert set(rows[0]) == {"timestamp", "input_length", "output_length", "hash_ids"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--capacity", "many"], "is not a size"),
        (["--capacity", "64GB"], "add --block-mib"),
        (["--capacity", "0"], "too small for a block"),
        (["--policy", "mru"], "known here are"),
        (["--policy", "belady", "--tier", "5"], "known here are"),
        (["--tier", "5:sometimes"], "is not a tier"),
        (["--tier", "5:cold:lru:x"], "is not a size"),
        (["--tier", "5:cold:lru:1:x"], "is not a tier"),
        (["--tier", "5:cold+promoted"], "is not a tier"),
        (["--keeps-nothing"], "at least one --tier"),
        (["--keeps-nothing", "--tier", "5", "--capacity", "5"], "no pool"),
        (["--capacity", "9999999999"], "simulated cache"),
    ],
)
def test_wrong_words_are_said(tmp_path, words, said):
    file = written(tmp_path / "trace.jsonl", "scan", requests=3)
    assert said in run("replay", file, *words, status=2)


def test_files_that_are_none_are_said(tmp_path):
    assert "cannot be read" in run("replay", str(tmp_path / "none.jsonl"), status=2)
    (tmp_path / "empty.jsonl").write_text("")
    assert "nothing to replay" in run("replay", str(tmp_path / "empty.jsonl"), status=2)


def test_sizes_and_tiers_are_read():
    assert blocks_of("1.5GiB", 1 << 20) == 1536
    assert blocks_of("17", None) == 17
    assert tier_of("9::s3fifo", None, POLICIES) == Tier(9, "s3fifo", "through")
    assert tier_of("9:cold", None, POLICIES) == Tier(9, "lru", "cold")
    assert tier_of("9:cold+promote", None, POLICIES) == Tier(9, "lru", "cold", promote=True)
    assert tier_of("9:::1GB", 1 << 20, POLICIES) == Tier(9, "lru", "through", writes_per_day=1024)


SMALL = {"pipeline": "Cache", "pool_gb": 0.25, "eviction": "lru"}
BLOCK_BYTES = 4096


@pytest.fixture
def store():
    with open_store(SMALL, layout=[BLOCK_BYTES], namespace={"trace": "test"}) as opened:
        yield opened


def test_what_is_played_hits_what_a_replay_hits(store):
    requests = list(generate("chat", requests=150, seed=2, per_second=50))
    played = play(store, requests, block_bytes=BLOCK_BYTES, clients=1, speed=None)
    rows = [row[3] for row in requests]
    assert (played.requests, played.blocks, played.errors) == (150, sum(map(len, rows)), 0)
    assert (played.wrong, played.failed) == (0, 0)
    assert played.hits == lru(rows, 1 << 30) > 0
    assert played.late_s == []


def test_played_by_the_clock_each_request_comes_when_it_is_due(store):
    requests = [(1000 + 20 * number, 512, 1, [number % 3]) for number in range(20)]
    played = play(store, requests, block_bytes=BLOCK_BYTES, clients=2, speed=10.0)
    assert played.seconds >= 0.038
    assert len(played.late_s) == played.requests == 20
    assert played.json(BLOCK_BYTES)["late_p99_ms"] >= 0


def test_wrong_bytes_are_found(store):
    blocks = list(range(CHUNK_BLOCKS + 5))
    client = Client(store, BLOCK_BYTES)
    client.serve(blocks)
    store.dump([(900).to_bytes(16, "little")], np.full((1, 1), client._addresses[0, 0])).wait().raise_for_failures()
    client.serve(blocks)
    assert (client.played.hits, client.played.wrong) == (len(blocks), 0)
    client.serve([899])
    assert client.played.wrong == 1


def test_play_on_the_command_line(tmp_path):
    file = written(tmp_path / "trace.jsonl", "agents", requests=30)
    # Several clients miss what another one has not stored yet, however long that takes.
    found = json.loads(run("play", file, "--block-kib", "4", "--requests", "20", "--clients", "1", "--json"))
    assert (found["requests"], found["errors"], found["wrong_blocks"], found["failed_blocks"]) == (20, 0, 0, 0)
    rows = [blocks for *_, blocks in read_traces([file])[0].requests()[:20]]
    assert found["hit"] == round(lru(rows, 1 << 30) / found["blocks"], 4) > 0.3
    assert "loaded_gb" in run("play", file, "--block-kib", "4", "--speed", "10000")
