"""Commands that take long say on a terminal how far they are, and nothing of it elsewhere."""

import io
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import kvdepot
from kvdepot.cli import main, progress
from kvdepot.cli.status_door import read_status
from kvdepot.compat import Shim


class Terminal(io.StringIO):
    """Collects what a terminal shows."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The counts that commands show on a terminal, by their labels."""
    counts: dict[str, int] = {}

    @contextmanager
    def counting(label: str, total: int | None = None, *, hidden: bool = False) -> Iterator[Callable[[int], object]]:
        if not hidden:
            counts[label] = 0

        def add(number: int) -> None:
            if not hidden:
                counts[label] += number

        yield add
        assert hidden or total in (None, counts[label])

    for verb in ("export", "gc", "namespaces", "prefetch", "rm", "stop", "trace", "trace_fleet", "verify"):
        monkeypatch.setattr(f"kvdepot.cli.{verb}.counting", counting)
    monkeypatch.setattr(progress, "counting", counting)
    return counts


def run(*words: object) -> str:
    ran = CliRunner().invoke(main, [str(word) for word in words])
    assert ran.exit_code == 0, ran.output
    return ran.stdout


def test_a_count_appears_after_a_while_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "BEGIN_S", 0.01)
    monkeypatch.setattr(progress, "STEP_S", 0.01)
    with progress.counting("blocks found", 2000) as add:
        add(1500)
        end = time.monotonic() + 60
        while "blocks found: 1,500 of 2,000, " not in terminal.getvalue():
            assert time.monotonic() < end, terminal.getvalue()
            time.sleep(0.01)
    assert terminal.getvalue().endswith(progress.CLEAR)


def test_the_seconds_alone_count_where_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "BEGIN_S", 0.01)
    with progress.counting("waiting for its exit", 0):
        end = time.monotonic() + 60
        while not re.search(r"waiting for its exit, \d+ s", terminal.getvalue()):
            assert time.monotonic() < end, terminal.getvalue()
            time.sleep(0.001)


def test_short_work_and_files_get_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, hidden, begin_s in ((Terminal(), False, 60.0), (Terminal(), True, 0.0), (io.StringIO(), False, 0.0)):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(progress, "BEGIN_S", begin_s)
        assert list(progress.counted(range(3), "blocks found", hidden=hidden)) == [0, 1, 2]
        assert stream.getvalue() == ""


def store_five_blocks(directory: Path) -> str:
    """Returns the id of their namespace."""
    with kvdepot.open(
        {"directories": [str(directory)], "pool_gb": 1 / 64, "log_level": "error"}, layout=[4096], namespace={"m": 1}
    ) as store:
        blocks = [[np.full(4096, index, dtype=np.uint8)] for index in range(5)]
        store.dump([b"block %d" % index for index in range(5)], blocks).wait().raise_for_failures()
        assert store.drain(60_000)
        return str(store.namespace_id)


def test_commands_that_read_directories_count_files(tmp_path: Path, shown: dict[str, int]) -> None:
    root = store_five_blocks(tmp_path)
    for words in (["ls", root[:4]], ["namespaces"], ["verify"]):
        shown.clear()
        run(*words, "--directory", tmp_path, "--json")
        assert shown == {}
        run(*words, "--directory", tmp_path)
        assert shown == {"blocks found" if words[0] == "ls" else "block files found": 5}


def test_commands_that_change_directories_count_files(tmp_path: Path, shown: dict[str, int]) -> None:
    file, blocks, runtime = tmp_path / "x.kvx", tmp_path / "blocks", tmp_path / "depot.yaml"
    blocks.mkdir()
    root = store_five_blocks(blocks)
    aside = next(blocks.rglob("*.kvb"))
    aside.rename(aside.with_suffix(".bad"))

    def counts(*words: object) -> dict[str, int]:
        shown.clear()
        run(*words, "--json")
        assert shown == {}
        run(*words)
        return dict(shown)

    with tempfile.TemporaryDirectory(prefix="kvd") as directory:
        runtime.write_text(f"directories: [{blocks}]\npool_gb: 0.015625\nsocket: {directory}/depot.sock\n")
        with serving(f"{directory}/depot.sock", "--config", str(runtime)):
            assert counts("export", root, file, "--force", "--config", runtime) == {
                "waiting for the depot to write": 0,
                "block files found": 4,
            }
            assert counts("prefetch", root, "--config", runtime) == {"block files found": 4, "blocks requested": 4}
    assert counts("gc", blocks, "--capacity-gb", 1) == {"garbage found": 1, "block files found": 4}
    shown.clear()
    run("rm", root, "--directory", blocks, "--yes")
    assert shown == {"block files found": 4, "block files removed": 5}


def test_commands_for_traces_count_requests(tmp_path: Path, shown: dict[str, int]) -> None:
    made, public = tmp_path / "made.jsonl", tmp_path / "public.jsonl"
    for words, counts, told in (
        (("generate", "chat", "--requests", 20, "--output", made), {"requests written": 20}, str(made)),
        (("convert", made, "--output", public), {"lines read": 20, "requests written": 20}, str(public)),
        (("replay", made, "--policy", "lru", "--capacity", "10,20"), {"lines read": 20, "replays": 2}, None),
        (("fleet", made, "--nodes", 2, "--capacity", 10), {"lines read": 20, "routes simulated": 3}, None),
        (("play", made, "--block-kib", 4, "--requests", 10), {"lines read": 20, "requests served": 10}, None),
    ):
        shown.clear()
        said = json.loads(run("trace", *words, "--json"))
        assert shown == {}
        if told is not None:
            assert said == {"output": told, "requests": 20}
        run("trace", *words)
        assert shown == counts


@contextmanager
def serving(socket: str, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A depot that serves a socket, and logs to a file beside it."""
    command = [sys.executable, "-m", "kvdepot", "serve", *words, "--socket", socket, "--log-file", f"{socket}.log"]
    with subprocess.Popen(command) as process:
        try:
            end = time.monotonic() + 60
            while read_status(socket) is None:
                assert time.monotonic() < end
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


def test_a_stop_waits_visibly(shown: dict[str, int]) -> None:
    with tempfile.TemporaryDirectory(prefix="kvd") as directory:
        socket, core = f"{directory}/depot.sock", '{"pipeline": "Cache", "pool_bytes": 16777216}'
        with serving(socket, "--core-json", core) as process:
            run("stop", "--socket", socket)
            assert process.wait(60) == 0
    assert shown == {"waiting for its exit": 0}


def test_names_of_other_projects_are_installed_and_removed_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shim, "directory", lambda _: tmp_path)
    written = json.loads(run("compat", "install", "infinistore", "--json"))
    assert written == {"name": "infinistore", "written": [str(tmp_path / "infinistore")]}
    assert json.loads(run("compat", "remove", "infinistore", "--json"))["removed"] == written["written"]
    assert json.loads(run("compat", "remove", "infinistore", "--json"))["removed"] == []
