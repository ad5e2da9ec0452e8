"""`make bench-lmcache`: ratios are of one round or one process, and a level that loses everything is shown as such."""

import csv

import pytest

from benches.engine.runs import Sent
from benches.lmcache.__main__ import ours
from benches.lmcache.adapters import Objects, read_report
from benches.lmcache.levels import Sizes
from benches.lmcache.long_doc_qa import LongDocQa, read_results
from benches.lmcache.report import print_first_token, print_queries
from benches.lmcache.stack import CHUNK_TOKENS, Life
from benches.lmcache.summary import PLAIN, RESTARTED, Queries, mean_ttft_ms, summarize, summarize_queries
from tools.lab.child import ChildError

TOKENS = 512
RIGHT, OTHER = (7, 7), (7, 8)
FIELDS = ("request_id", "successful", "ttft", "submit_time", "finish_time", "num_input_tokens")


def life(found=(), **steps):
    """Returns answers to one prompt: of each step its time, its tokens found, and the answer."""
    sent = {f"{step}/{TOKENS}": Sent((ms,), (hit,), (answer,)) for step, (ms, hit, answer) in steps.items()}
    return Life(sent, (1.0,), found={f"{step}/{TOKENS}": levels for step, levels in found})


PLAIN_LIFE = life(cold=(1000.0, 0, RIGHT), own=(20.0, TOKENS, RIGHT))
FIRST = life(
    [("L1", {"L1": TOKENS, "L2": 0}), ("L2", {"L1": 0, "L2": TOKENS})],
    cold=(1100.0, 0, RIGHT),
    own=(20.0, TOKENS, RIGHT),
    L1=(40.0, TOKENS, RIGHT),
    L2=(50.0, TOKENS, RIGHT),
)


def restarted(ms, hit, answer=RIGHT):
    levels = {"L1": 0, "L2": hit}
    cold, own = (900.0, 0, OTHER), (30.0, TOKENS, RIGHT)
    return life([("hit", levels)], cold=cold, own=own, hit=(ms, hit, answer))


def rows_of(second, rounds=1):
    one = {PLAIN: PLAIN_LIFE, "level": FIRST, f"level{RESTARTED}": second}
    rows = summarize([one] * rounds, {"level": "Level"}, TOKENS)
    return {(row.title, row.step): row for row in rows}


def test_hits_are_compared_with_their_own_process():
    rows = rows_of(restarted(60.0, TOKENS))
    after = rows["Level", "after a restart"]
    assert after.cell.faster == 900 / 60
    assert after.cell.of_own == 2.0
    assert rows["Level", "from the second level"].cell.of_own == 2.5
    assert rows["Level", "nothing found"].cell.faster == pytest.approx(1000 / 1100)


def test_tokens_are_counted_for_each_of_lmcaches_levels_over_all_rounds():
    rows = rows_of(restarted(60.0, TOKENS), rounds=2)
    assert rows["Level", "from LMCache's memory"].found == {"L1": 2 * TOKENS, "L2": 0}
    assert rows["Level", "after a restart"].found == {"L1": 0, "L2": 2 * TOKENS}
    assert rows["Level", "nothing found"].found == {"L1": 0, "L2": 0}


def test_a_level_that_has_lost_everything_is_a_row_without_hits():
    after = rows_of(restarted(900.0, 0))["Level", "after a restart"]
    assert after.cell.hit_tokens == (0,)
    assert after.found == {"L1": 0, "L2": 0}
    assert after.cell.faster == 1.0


def test_another_answer_is_noticed():
    rows = rows_of(restarted(60.0, TOKENS, OTHER))
    assert not rows["Level", "after a restart"].cell.same_output
    assert rows["Level", "from the second level"].cell.same_output


def queries(seconds, ttft_ms, found=0, failed=0):
    return Queries(seconds, tuple(ttft_ms), failed, 1000, found, {"L1": 0, "L2": found}, 1.0)


def test_queries_are_compared_with_the_run_of_their_round_without_a_second_level():
    rounds = [
        {"off": queries(10.0, [100.0, 300.0]), "level": queries(5.0, [50.0, 50.0], 900)},
        {"off": queries(40.0, [100.0, 100.0]), "level": queries(10.0, [100.0, 100.0], 800, failed=1)},
        {"off": queries(10.0, [100.0, 100.0]), "level": queries(10.0, [100.0, 100.0], 1000)},
    ]
    rows = summarize_queries(rounds, "off")
    assert rows["off"].seconds_of_off == rows["off"].ttft_of_off == 1.0
    level = rows["level"]
    assert (level.seconds, level.seconds_of_off, level.ttft_of_off) == (10.0, 0.5, 1.0)
    assert (level.hit_part, level.l2_part, level.failed) == (0.8, 0.8, 1)
    assert mean_ttft_ms(rounds[0]["off"]) == 200.0
    assert summarize_queries([{"level": rounds[0]["level"]}], "off")["level"].seconds_of_off is None


def written(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(dict(zip(FIELDS, row, strict=True)) for row in rows)
    return path


def test_results_of_lmcache_are_read(tmp_path):
    rows = [("doc0_q0", True, 0.5, 100.0, 102.0, 500), ("doc1_q0", True, 0.25, 101.0, 104.0, 501)]
    path = written(tmp_path / "results.csv", [*rows, ("doc0_q1", False, -1, 102.0, 102.5, 0)])
    found = read_results(path, 900, {"L1": 0, "L2": 900})
    assert (found.seconds, found.ttft_ms, found.failed, found.asked_tokens) == (4.0, (500.0, 250.0), 1, 1001)
    with pytest.raises(ChildError, match="no query was answered"):
        read_results(written(tmp_path / "none.csv", [("doc0_q0", False, -1, 1.0, 2.0, 0)]), 0, {})


def test_lmcache_makes_as_many_documents_as_asked_for(tmp_path):
    asked = LongDocQa(None, tmp_path, "bfloat16", 30, 2000, 2, 40, 5, 8192, {})
    words = asked.command("http://127.0.0.1:1", tmp_path)
    options = dict(zip(words[3::2], words[4::2], strict=False))
    # As LMCache computes it.
    volume, per_gb = float(options["--kv-cache-volume"]), int(options["--tokens-per-gb-kvcache"])
    assert int(volume * per_gb / int(options["--ldqa-document-length"])) == 30
    every = 30 * 2000 * 8192
    assert asked.sizes.whole_bytes == pytest.approx(every / 2, abs=8)
    assert asked.sizes.chunk_bytes == CHUNK_TOKENS * 8192


def test_memory_is_the_same_for_all():
    assert Sizes(3, 2, 9, 1).whole_bytes == 5
    assert ours() == ["kvdepot, Cache|Posix", "kvdepot, Cache|Dax"]


def test_tables_are_printed(capsys):
    print_first_token(list(rows_of(restarted(900.0, 0)).values()), TOKENS)
    print_queries(summarize_queries([{"off": queries(10.0, [100.0])}], "off"), "30 documents")
    text = capsys.readouterr().out
    assert "after a restart" in text
    assert "512 + 0" in text
    assert "30 documents" in text


def operations(**changes):
    """Returns a report of ``lmcache bench l2`` about ten objects; a change names operation and figure."""
    found = {
        name: {"operation": name, "total_keys": 10, "total_success": 10, "duration_p50_ms": ms}
        for name, ms in (("Store", 3.0), ("Lookup", 1.0), ("Load", 2.0))
    }
    found["Lookup"]["total_success"] = 0
    for name, success in changes.items():
        found[name]["total_success"] = success
    return {"metrics": {"config": {}, **{f"op_{number}": one for number, one in enumerate(found.values())}}}


def test_medians_of_lmcaches_own_benchmark_are_taken_by_operation():
    sample, counts = read_report(operations(), "")
    assert sample == {"store_ms": 3.0, "load_ms": 2.0, "absent_ms": 1.0}
    assert counts == {"failed": 0}


def test_objects_that_do_not_come_back_are_counted():
    assert read_report(operations(Load=7), "")[1] == {"failed": 3}


@pytest.mark.parametrize("changes", [{"Store": 9}, {"Lookup": 1}])
def test_a_benchmark_that_stored_too_little_or_found_too_much_fails(changes):
    with pytest.raises(ChildError, match="the log"):
        read_report(operations(**changes), "the log")


def test_objects_are_named_by_number_and_size():
    assert str(Objects.parse("32x1024")) == "32 objects of 1024 KiB"
    for text in ("", "32", "x1", "0x64", "2x0", "2x-1", "2x64k"):
        with pytest.raises(ValueError):  # noqa: PT011 - argparse writes the message
            Objects.parse(text)
