"""`kvdepot why`: what a running depot tells of requests and blocks that were not found, and how people are told."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from node import NodeDepot

import kvdepot
from kvdepot.cli import main
from kvdepot.cli.why import REASONS, reason_text

LAYOUT = kvdepot.BlockLayout(shards=1, tensor_sizes_bytes=[4096])
NAMES = [f"{index:016}".encode() for index in range(4)]
BLOCK = [np.zeros(4096, np.uint8)]


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(main, [str(one) for one in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def dump(store: kvdepot.Store, names: list[bytes]) -> None:
    store.dump(names, [BLOCK] * len(names)).wait().raise_for_failures()
    assert store.drain(60_000)


@pytest.fixture
def depot(tmp_path: Path) -> Iterator[NodeDepot]:
    depot = NodeDepot(tmp_path)
    yield depot
    depot.kill()


def socket(depot: NodeDepot) -> str:
    return str(depot.config["socket"])


def misses(depot: NodeDepot, *arguments: object) -> list[dict[str, Any]]:
    told: dict[str, Any] = json.loads(run("why", "--socket", socket(depot), "--json", *arguments))
    return list(told["misses"])


def told(depot: NodeDepot, count: int) -> None:
    """Waits until so many misses are told: a claim may be settled just before its miss is."""
    end = time.monotonic() + 120
    while len(misses(depot)) < count:
        assert time.monotonic() < end, f"not {count} misses"


def test_the_last_misses_are_told_newest_first(depot: NodeDepot) -> None:
    with depot.open(LAYOUT, {"model": "a"}) as store:
        assert misses(depot) == []
        assert "no misses or partial hits" in run("why", "--socket", socket(depot))
        dump(store, NAMES[:2])
        assert store.lookup_on_prefix(NAMES[:2]) == 2
        assert store.lookup_on_prefix(NAMES) == 2
        assert store.lookup_on_prefix(NAMES[3:]) == 0
        newest, before = misses(depot)
        assert (newest["hash"], newest["hit"], newest["asked"]) == (NAMES[3].hex(), 0, 1)
        assert (before["hash"], before["hit"], before["asked"]) == (NAMES[2].hex(), 2, 4)
        assert (before["reason"], before["by"], before["other_namespaces"]) == ("never_stored", "lookup", [])
        assert before["client_pid"] > 0
        assert len(misses(depot, "--last", 1)) == 1
        text = run("why", "--socket", socket(depot), "--last", 2)
        assert "2 of 4" in text
        assert REASONS["never_stored"] in text
        assert store.stats()["depot"]["misses"]["never_stored"] == 2


def test_a_claim_is_found_by_what_its_engine_calls_it(depot: NodeDepot) -> None:
    from kvdepot import _native

    with depot.open(LAYOUT, {"model": "a"}) as store:
        dump(store, NAMES[:1])
        engine = _native.Depot.connect(socket(depot), None, wait_ms=60_000, call_timeout_ms=60_000)
        namespace = engine.open_namespace('{"model":"a"}', "[[1,[4096]]]")
        for count, label in enumerate(("cmpl-1 é&=%", "cmpl-2", "é" * 500), 1):
            claim = engine.claim([([namespace], 0, 1)], NAMES, skip=0, limit=4, label=label)
            assert claim.wait(60_000)[:2] == (True, 1)
            claim.release()
            told(depot, count)
        assert engine.claim([([namespace], 0, 1)], NAMES[:1], skip=0, limit=1, label="hit").decline()[:2] == (True, 1)
        engine.close()
        (found,) = misses(depot, "cmpl-1 é&=%")
        assert (found["request"], found["hit"], found["by"]) == ("cmpl-1 é&=%", 1, "claim")
        assert [one["request"] for one in misses(depot, "cmpl")] == ["cmpl-2", "cmpl-1 é&=%"]
        for label in ("é", "é" * 96, "é" * 500):
            assert misses(depot, label)[0]["request"] == "é" * 96
        said = run("why", "hit", "--socket", socket(depot), status=2)
        assert "has a request id that begins with hit:" in said


def test_what_a_client_calls_its_requests_does_not_steer_the_terminal(depot: NodeDepot) -> None:
    from kvdepot import _native

    with depot.open(LAYOUT, {"model": "\x1b[2J"}) as store:
        engine = _native.Depot.connect(socket(depot), None, wait_ms=60_000, call_timeout_ms=60_000)
        namespace = engine.open_namespace('{"model":"a"}', "[[1,[4096]]]")
        dump(store, NAMES[:1])
        claim = engine.claim([([namespace], 0, 1)], NAMES, skip=0, limit=4, label="\x1b]0;owned\x07\u202e")
        claim.wait(60_000)
        claim.release()
        engine.close()
        told(depot, 1)
        text = run("why", "--socket", socket(depot))
        assert "\ufffd]0;owned\ufffd\ufffd" in text.replace("\n", "")
        assert "\ufffd[2J" in text
        assert all(one.isprintable() or one == "\n" for one in text)
        assert misses(depot, "\x1b]0")[0]["request"] == "\x1b]0;owned\x07\u202e"


def test_arguments_that_are_no_text_are_answered(depot: NodeDepot) -> None:
    odd = os.fsdecode(b"cmpl-\xff\xfe")
    with depot.open(LAYOUT, {"model": "a"}):
        said = run("why", odd, "--socket", socket(depot), status=2)
        assert "has a request id that begins with cmpl-??" in said
        said = run("why", odd, odd, "--socket", socket(depot), status=2)
        assert "a block hash is 32 hexadecimal digits" in said


def test_blocks_of_other_facts_are_named_with_what_differs(depot: NodeDepot) -> None:
    with depot.open(LAYOUT, {"model": "a", "dtype": "bf16"}) as one:
        dump(one, NAMES[:1])
        with depot.open(LAYOUT, {"model": "a", "dtype": "fp8"}) as other:
            assert other.lookup_on_prefix(NAMES[:1]) == 0
            (miss,) = misses(depot)
            assert miss["reason"] == "other_namespace"
            text = run("why", "--socket", socket(depot))
            assert "has a block of the same hash" in text
            assert any(line.split() == ["dtype", "fp8", "bf16"] for line in text.splitlines()), text
            told = json.loads(run("why", miss["namespace"][:10], NAMES[0].hex(), "--socket", socket(depot), "--json"))
            (block,) = told["blocks"]
            assert (block["at"], block["reason"]) == (None, "other_namespace")
            (pair,) = told["differences"]
            assert [fact["fact"] for fact in pair["facts"]] == ["dtype"]
            assert block["other_namespaces"] == [pair["other"]]


def test_given_blocks_are_told_where_they_are(depot: NodeDepot, tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    directory.mkdir()
    depot.config |= {"pipeline": "Cache|Posix", "directories": [str(directory)]}
    with depot.open(LAYOUT, {"model": "a"}) as store:
        dump(store, NAMES[:2])
        store.reset()
        dump(store, NAMES[1:2])
        (root,) = (entry.name for entry in directory.iterdir() if len(entry.name) == 32)
        asked = ["why", root[:8], *(name.hex() for name in NAMES[:3]), "--socket", socket(depot)]
        was_reset, there, never = json.loads(run(*asked, "--json"))["blocks"]
        assert (was_reset["at"], was_reset["reason"]) == (None, "reset")
        assert there == {"hash": NAMES[1].hex(), "at": "pool"}
        assert (never["at"], never["reason"]) == (None, "never_stored")
        text = run(*asked)
        assert "it is there" in text
        assert REASONS["reset"] in text


def test_a_damaged_file_is_told_as_such(depot: NodeDepot, tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    directory.mkdir()
    depot.config |= {"pipeline": "Posix", "directories": [str(directory)], "io_direct": False}
    with depot.open(LAYOUT, {"model": "a"}) as store:
        dump(store, NAMES[:1])
        (file,) = directory.rglob("*.kvb")
        whole = bytearray(file.read_bytes())
        whole[-1] ^= 1
        shutil.copyfile(file, tmp_path / "before")
        file.write_bytes(whole)
        assert list(store.load(NAMES[:1], [[np.empty(4096, np.uint8)]]).wait().failed) == [0]
        assert store.lookup_on_prefix(NAMES[:1]) == 0
        (miss,) = misses(depot)
        assert (miss["reason"], miss["place"]) == ("checksum", "posix")
        assert "its checksum differed when a tier read it (posix)" in run("why", "--socket", socket(depot))


def test_what_cannot_be_asked_is_one_line(depot: NodeDepot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert "no depot of this user runs" in run("why", status=1)
    assert "no depot answers at" in run("why", "--socket", tmp_path / "nobody", status=1)
    with depot.open(LAYOUT, {"model": "a"}):
        for arguments, says in (
            (("0123456789", NAMES[0].hex()), "no namespace with this prefix was opened"),
            (("", "12"), "a block hash is 32 hexadecimal digits"),
            (("", NAMES[0].hex(), "--last", 3), "--last is about requests"),
        ):
            said = run("why", *arguments, "--socket", socket(depot), status=2)
            assert says in said
            assert said.count("\n") == 1


def test_a_depot_that_answers_too_many_questions_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = (503, b'{"error": "busy: too many questions"}')
    monkeypatch.setattr("kvdepot.cli.status_door.ask_page", lambda socket, page: busy)
    assert "too many questions" in run("why", "3f2a", "12", "--socket", "any.sock", status=1)


def test_every_reason_of_the_depot_has_its_words(depot: NodeDepot) -> None:
    with depot.open(LAYOUT, {"model": "a"}) as store:
        assert set(store.stats()["depot"]["misses"]) == set(REASONS)


def test_places_and_times_are_told_for_people() -> None:
    miss = {"reason": "evicted", "place": "pool", "gone_s": 400, "kept_s": 30}
    assert reason_text(miss) == "evicted from pool, 7 min before, after 30 s in the pool [evicted]"
    miss = {"reason": "read_failed", "place": "posix", "gone_s": 5, "kept_s": None}
    assert reason_text(miss) == "a tier could not read it (posix), 5 s before [read_failed]"
    miss = {"reason": "never_stored", "place": None, "gone_s": None, "kept_s": None}
    assert reason_text(miss) == f"{REASONS['never_stored']} [never_stored]"
