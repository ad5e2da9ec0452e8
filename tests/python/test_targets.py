"""Which depot a verb uses, and that no verb removes files of a running depot."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import kvdepot
from kvdepot.cli import main, processes
from kvdepot.cli.processes import DepotProcess
from kvdepot.cli.running import RunningDepot, user_of
from kvdepot.stored.gc import find_garbage, remove
from kvdepot.stored.namespaces import find_namespaces
from kvdepot.stored.temporaries import own_host, start_time

LAYOUT = kvdepot.BlockLayout(shards=1, tensor_sizes_bytes=[5000])
NAMES = [f"block {index}".encode() for index in range(5)]
LONG_S = 120


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(main, [str(one) for one in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def fill(directory: Path, model: str = "tiny", **more: Any) -> str:
    directory.mkdir(exist_ok=True)
    settings = {"directories": [str(directory)], "pool_gb": 0.0625, "log_level": "warn", **more}
    with kvdepot.open(settings, layout=LAYOUT, namespace={"model": model}) as store:
        rows = [[np.full(5000, index, dtype=np.uint8)] for index in range(len(NAMES))]
        store.dump(NAMES, rows).wait().raise_for_failures()
        assert store.drain(60_000)
        return store.namespace_id


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The test's own runtime directory, where no depot of the user runs."""
    with tempfile.TemporaryDirectory(prefix="kvd") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        monkeypatch.setenv("XDG_CACHE_HOME", directory)
        yield Path(directory)


@pytest.fixture
def serve(runtime: Path) -> Iterator[Callable[[Path], tuple[Path, Path]]]:
    """Starts a depot over a directory, at a socket of the configuration. Returns configuration and socket."""
    started = []

    def serve(directory: Path) -> tuple[Path, Path]:
        file, socket = runtime / "kvdepot.yaml", runtime / "else.sock"
        file.write_text(f"directories: [{directory}]\npool_gb: 0.0625\nsocket: {socket}\n")
        command = [sys.executable, "-m", "kvdepot", "serve", f"--config={file}", "--drain-timeout=45"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stderr is not None
        assert any("serving " in line for line in process.stderr)
        return file, socket

    yield serve
    for process in started:
        process.terminate()
        assert process.wait(LONG_S) == 0
        assert process.stderr is not None
        process.stderr.close()


def test_a_depot_at_a_configured_socket_is_seen(
    tmp_path: Path, serve: Callable[[Path], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the units and the manifests start it: --config=FILE, and a socket that is not a default one."""
    directory = tmp_path / "blocks"
    root = fill(directory)
    file, socket = serve(directory)
    for how in ([directory], ["--config", file]):
        assert f"{socket} (pid" in run("gc", *how, "--apply", status=1)
    assert json.loads(run("rm", root, "--directory", directory, "--yes", "--json"))["how"] == "reset"
    # If the directories of the process are unknown, those of the configuration count.
    monkeypatch.setattr("kvdepot.cli.running.serving", lambda: iter(()))
    monkeypatch.setattr("kvdepot.cli.running.process", lambda pid: DepotProcess(pid, None, ""))
    assert f"{socket} (pid" in run("gc", "--config", file, "--apply", status=1)


def test_options_that_disagree_are_refused(tmp_path: Path, serve: Callable[[Path], tuple[Path, Path]]) -> None:
    root, other = fill(tmp_path / "blocks"), tmp_path / "other"
    fill(other)
    file, socket = serve(tmp_path / "blocks")
    assert "has other directories" in run("rm", root, "--config", file, "--directory", other, "--yes", status=2)
    assert f"uses {tmp_path}/blocks" in run("rm", root, "--socket", socket, "--directory", other, "--yes", status=2)
    assert len(list(other.rglob("*.kvb"))) == len(NAMES)


def test_a_socket_alone_means_its_own_depots_directories(
    tmp_path: Path, serve: Callable[[Path], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default directories, which have no reset, say nothing about the depot at the socket."""
    directory = tmp_path / "blocks"
    root = fill(directory)
    run("export", root, tmp_path / "x.kvx", "--directory", directory)
    _, socket = serve(directory)
    run("reset", root, "--socket", socket)
    assert "was reset since" in run("import", tmp_path / "x.kvx", "--socket", socket, status=2)
    monkeypatch.setattr("kvdepot.cli.targets.process", lambda pid: DepotProcess(pid, None, ""))
    assert "has no directories that show" in run("import", tmp_path / "x.kvx", "--socket", socket, status=2)
    how = ("--socket", socket, "--directory", directory)
    assert "it is unknown whether" in run("import", tmp_path / "x.kvx", *how, status=2)


@pytest.mark.parametrize(
    ("words", "variables", "directories"),
    [
        (["--service-port", "1"], {}, ()),
        (["--service-port=1"], {}, ()),
        (["--auto-increase"], {"KVDEPOT_REMOTE_SERVERS": "a:1"}, ()),
        (["--service-port", "1"], {"KVDEPOT_PIPELINE": "Cache|Posix", "KVDEPOT_DIRECTORIES": "/a"}, ("/a",)),
        ([], {"KVDEPOT_DIRECTORIES": "/a"}, ("/a",)),
        ([], {"XDG_CACHE_HOME": "/c"}, ("/c/kvdepot",)),
        (["--core-json={\"posix\": {\"directories\": [\"/b\"]}}", "--socket=/s"], {}, ("/b",)),
        (["--config=/nowhere/x.yaml"], {}, None),
    ],
)  # fmt: skip
def test_a_process_says_which_directories_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], variables: dict[str, str], directories: Any
) -> None:
    """A pool server without a file stores nothing on disk, as `kvdepot serve` decides."""
    own = tmp_path / "7"
    own.mkdir()
    (own / "cmdline").write_bytes("\0".join(["python", "-m", "kvdepot", "serve", *words, ""]).encode())
    (own / "environ").write_bytes("".join(f"{name}={value}\0" for name, value in variables.items()).encode())
    monkeypatch.setattr(processes, "PROC", tmp_path)
    (found,) = processes.serving()
    assert found == processes.process(7)
    assert (found.pid, found.directories) == (7, directories)
    assert found.socket == ("/s" if "--socket=/s" in words else "")


def test_rm_looks_again_after_the_question(
    tmp_path: Path, serve: Callable[[Path], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "blocks"
    root = fill(directory)
    monkeypatch.setattr("kvdepot.cli.rm.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    monkeypatch.setattr("kvdepot.cli.rm.click.confirm", lambda *_, **__: serve(directory))
    assert "removed from the depot on" in run("rm", root, "--directory", directory)


def test_gc_looks_again_before_it_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "blocks"
    root = fill(directory)
    for path in directory.rglob("*.kvb"):
        path.unlink()
    users = iter([None, RunningDepot("/late.sock", 7, {})])
    monkeypatch.setattr("kvdepot.cli.gc.user_of", lambda *_: next(users))
    assert "/late.sock" in run("gc", directory, "--apply", status=1)
    assert (directory / root).exists()
    (found,) = find_garbage([directory])
    fill(directory)
    assert remove(found, [directory]) == 0
    assert len(list(directory.rglob("*.kvb"))) == len(NAMES), "blocks that were stored meanwhile stay"
    (directory / root / "namespace.json").rename(directory / "kept")
    (found,) = find_garbage([directory])
    (directory / "kept").rename(directory / root / "namespace.json")
    assert (found.kind, remove(found, [directory])) == ("unknown namespace", 0)
    assert len(list(directory.rglob("*.kvb"))) == len(NAMES)
    assert find_namespaces([directory])[0].problem == ""


def test_gc_leaves_the_ledger_of_a_shared_cap_alone(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    fill(directory, posix_capacity_gb=1, posix_capacity_shared=True)
    versions = sorted(directory.glob(".kvdepot-ledger/*"))
    assert versions
    assert len(list(directory.rglob("*.kvb"))) == len(NAMES)
    assert not list(find_garbage([directory]))
    run("gc", directory, "--apply")
    assert sorted(directory.glob(".kvdepot-ledger/*")) == versions


def test_gc_leaves_names_of_others_and_living_writers_alone(tmp_path: Path) -> None:
    pid, old = os.getpid(), time.time() - 7200
    live = f".tmp-{own_host()}-{pid}-{start_time(pid)}-1"
    dead = f".tmp-{own_host()}-{pid}-{start_time(pid)}9-2"
    files = [".tmp-x", ".tmp-abc-1", ".probe-x", ".probe-1", live, dead, ".tmp-else-1-2-3", ".probe-7-0a1b"]
    for name in files:
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (old, old))
    for name in (".tmp-else-4-5-6", ".probe-dir", ".probe-7-abcd", ".probe-7-abcd_efg"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (old, old))
    ours = {dead, ".tmp-else-1-2-3", ".probe-7-0a1b", ".probe-7-abcd_efg"}
    assert {one.path.name for one in find_garbage([tmp_path])} == ours
    os.utime(tmp_path / dead)
    os.utime(tmp_path / ".tmp-else-1-2-3")
    assert {one.path.name for one in find_garbage([tmp_path])} == ours - {".tmp-else-1-2-3"}, (
        "a dead writer needs no hour"
    )


def test_another_users_process_that_claims_the_directories_is_not_connected_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would get the blocks of an import. Commands refuse, because it may really use the directories."""
    directory = tmp_path / "blocks"
    root = fill(directory)
    foreign = DepotProcess(os.getpid(), (str(directory),), str(tmp_path / "its.sock"))
    monkeypatch.setattr("kvdepot.cli.running.serving", lambda: iter([foreign]))
    monkeypatch.setattr("kvdepot.cli.targets.process", lambda _: foreign)
    asked: list[str] = []
    monkeypatch.setattr("kvdepot.cli.running.ask", asked.append)
    users = {"its": 12_345, "root": 0}
    monkeypatch.setattr("kvdepot.cli.running.uid_of", lambda _: users["its"])
    found = user_of([directory])
    assert found is not None
    assert (found.socket, found.pid, asked) == ("an unknown socket", os.getpid(), [])
    for verb in (("rm", root, "--yes"), ("export", root, tmp_path / "blocks.kvx")):
        assert "an unknown socket" in run(*verb, "--directory", directory, status=1)
    assert foreign.socket not in asked
    assert len(list(directory.rglob("*.kvb"))) == len(NAMES)
    users["its"] = 0
    user_of([directory])
    assert asked[-1] == foreign.socket


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_configuration_that_is_no_file_is_not_read(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a pipe of another process would not end, and its ``/dev/stdin`` is ours here."""
    file = tmp_path / "kvdepot.yaml" if kind == "pipe" else Path("/dev/stdin")
    if kind == "pipe":
        os.mkfifo(file)
    words = ["python", "/bin/kvdepot", "serve", "--config", str(file), "--socket", "/its.sock"]
    monkeypatch.setattr(processes, "_words", lambda _: words)
    assert processes.process(os.getpid()) == DepotProcess(os.getpid(), None, "/its.sock")
