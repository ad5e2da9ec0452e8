"""Depots that run here: found, ended in order, and not started twice with doors that the first one lacks."""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from kvdepot.cli import main, processes, stop
from kvdepot.cli.doctor import directory_users_with, own_socket
from kvdepot.cli.processes import DepotProcess
from kvdepot.cli.running import RunningDepot, ask, directory_users, running_depots
from kvdepot.config import load_config

LONG_S = 120
QUIET_S = 10


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The test's own runtime directory, with a short name."""
    with tempfile.TemporaryDirectory(prefix="kvd") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        monkeypatch.setenv("XDG_CACHE_HOME", directory)
        yield Path(directory)


@pytest.fixture
def serve(runtime: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts depots, and ends those that the test has not ended."""
    started = []

    def serve(*arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "kvdepot", "serve", *arguments]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})
        started.append(process)
        assert process.stderr is not None
        for line in process.stderr:
            if "serving " in line:
                break
        return process

    yield serve
    for process in started:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(main, [str(one) for one in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def config(runtime: Path, name: str, pool_gb: float) -> Path:
    path = runtime / f"{name}.yaml"
    path.write_text(f"pipeline: Cache\npool_gb: {pool_gb}\n")
    return path


def test_depots_are_listed_and_ended(runtime: Path, serve: Callable[..., "subprocess.Popen[str]"]) -> None:
    assert "no depot of this user runs" in run("depots")
    small, large = config(runtime, "small", 0.0625), config(runtime, "large", 0.125)
    first, second = serve("--config", str(small)), serve("--config", str(large))
    # Left behind by a killed one.
    (runtime / "kvdepot" / "depot-000000000000.sock").touch()
    listed = json.loads(run("depots", "--json"))
    assert sorted((one["pid"], one["pool_bytes"]) for one in listed) == sorted(
        [(first.pid, 64 << 20), (second.pid, 128 << 20)]
    )
    assert str(first.pid) in run("depots")
    said = run("stop", "--config", small)
    assert f"stopping depot {first.pid}" in said
    assert said.splitlines()[-1] == f"depot {first.pid} has exited"
    assert first.wait(LONG_S) == 0
    run("stop", "--config", small, status=1)
    assert [one["pid"] for one in json.loads(run("depots", "--json"))] == [second.pid]
    (ended,) = json.loads(run("stop", "--all", "--json"))
    assert (ended["pid"], ended["ended"]) == (second.pid, True)
    assert second.wait(LONG_S) == 0


@pytest.fixture
def configured(
    runtime: Path, serve: Callable[..., "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> "subprocess.Popen[str]":
    """A depot at a configured socket, found by its process, as those of systemd and containers."""

    def own() -> Iterator[DepotProcess]:
        return (one for one in processes.own_serving() if one.socket.startswith(f"{runtime}/"))

    monkeypatch.setattr("kvdepot.cli.running.own_serving", own)
    file = runtime / "configured.yaml"
    file.write_text(f"pipeline: Cache\npool_gb: 0.0625\nsocket: {runtime}/configured.sock\n")
    return serve("--config", str(file))


def test_depots_at_configured_sockets_are_listed_and_ended(
    runtime: Path, serve: Callable[..., "subprocess.Popen[str]"], configured: "subprocess.Popen[str]"
) -> None:
    first = serve("--config", str(config(runtime, "small", 0.0625)))
    listed = json.loads(run("depots", "--json"))
    assert [one["pid"] for one in listed] == [first.pid, configured.pid]
    assert listed[1]["socket"] == f"{runtime}/configured.sock"
    assert {one["socket"] for one in json.loads(run("top", "--json"))} == {one["socket"] for one in listed}
    assert [one["ended"] for one in json.loads(run("stop", "--all", "--json"))] == [True, True]
    assert (first.wait(LONG_S), configured.wait(LONG_S)) == (0, 0)


def test_a_socket_of_another_process_is_not_listed(
    runtime: Path, configured: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's path may be that of another depot here."""
    other = DepotProcess(os.getpid(), (), f"{runtime}/configured.sock")
    monkeypatch.setattr("kvdepot.cli.running.own_serving", lambda: iter([other]))
    assert json.loads(run("depots", "--json")) == []


def test_stop_goes_on_at_a_depot_that_it_cannot_stop(
    runtime: Path, serve: Callable[..., "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = serve("--config", str(config(runtime, "small", 0.0625)))
    far = RunningDepot("/far/depot.sock", 0, {"dirty_blocks": 0})
    monkeypatch.setattr("kvdepot.cli.stop.running_depots", lambda: iter([far, *running_depots()]))
    result = CliRunner().invoke(main, ["stop", "--all", "--json"])
    assert result.exit_code == 1
    assert [(one["pid"], one["ended"]) for one in json.loads(result.stdout)] == [(None, False), (process.pid, True)]
    assert "/far/depot.sock runs in another pid namespace" in json.loads(result.stdout)[0]["error"]
    assert "/far/depot.sock runs in another pid namespace" in result.stderr
    assert process.wait(LONG_S) == 0


def test_the_process_of_a_depot_is_named_as_it_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container a depot is mostly process 1, which is another one here."""
    for pid, words, inner in ((70, "kvdepot\0serve", "70 1"), (71, "kvdepot\0serve", "71"), (1, "init", "1")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_text(f"{words}\0")
        (tmp_path / str(pid) / "status").write_text(f"Name: x\nNSpid:\t{inner}\n")
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert processes.pid_here(71, 71) == 71
    assert processes.pid_here(70, 1) == 70
    assert processes.pid_here(72, 71) == 71, "it took the socket over"
    assert [processes.pid_here(72, told) for told in (1, 9)] == [0, 0], "its predecessor was in a container"
    assert processes.pid_here(0, 71) == 0


def test_a_depot_that_does_not_end_in_time_is_named(
    runtime: Path, serve: Callable[..., "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config(runtime, "depot", 0.0625)
    process = serve("--config", str(file))
    monkeypatch.setattr("signal.pidfd_send_signal", lambda *_: None)
    assert f"depot {process.pid} has not exited within 0.1 s" in run(
        "stop", "--config", file, "--timeout", 0.1, status=1
    )
    assert process.poll() is None


def test_ports_that_the_running_depot_does_not_have_are_an_error(
    runtime: Path, serve: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """It is not enough that some depot serves the socket: the ports would have no listener."""
    file = config(runtime, "depot", 0.0625)
    process = serve("--config", str(file))
    said = run("serve", "--config", file, "--service-port", 0, "--manage-port", 0, status=1)
    assert f"a depot (pid {process.pid}) already serves" in said
    assert "--take-over" in said
    assert "already serves" in run("serve", "--config", file, "--metrics-port", 9400, status=1)


def test_a_pool_server_without_a_file_writes_nothing_to_disk(
    runtime: Path, serve: Callable[..., "subprocess.Popen[str]"]
) -> None:
    socket = str(runtime / "depot.sock")
    serve("--socket", socket, "--service-port", "0", "--manage-port", "0", "--prealloc-size", "0.0625")
    depot = ask(socket)
    assert depot is not None
    assert (depot.stats["pipeline"], depot.stats["tiers"]) == ("Cache", [])
    assert not any(runtime.rglob("namespace.json"))


def test_a_depot_that_hangs_does_not_prolong_the_wait(
    runtime: Path, serve: Callable[..., "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, stop asks it how many blocks are left."""
    file = config(runtime, "depot", 0.0625)
    serve("--config", str(file))
    (listed,) = json.loads(run("depots", "--json"))
    door = Path(f"{listed['socket']}.http")
    door.unlink()
    monkeypatch.setattr("signal.pidfd_send_signal", lambda *_: None)
    monkeypatch.setattr("kvdepot.cli.stop.sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: True)))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(door))
        silent.listen()
        begun = time.monotonic()
        run("stop", "--config", file, "--timeout", 1, status=1)
    assert time.monotonic() - begun < stop.WAIT_S - 1


@contextlib.contextmanager
def warned(config: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Starts depots until one warns, and yields that with the line: each looks once, and not for long."""
    command = [sys.executable, "-m", "kvdepot", "serve", "--config", str(config)]
    end_s = time.monotonic() + LONG_S
    while True:
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as depot:
            try:
                # Before or after the line that says that it serves.
                if line := line_with("posix_capacity_shared", depot):
                    yield depot, line
                    return
            finally:
                depot.kill()
        assert time.monotonic() < end_s, "no depot has warned"


def line_with(text: str, depot: "subprocess.Popen[str]") -> str:
    """Returns the first such line of a depot's log; empty if it logs nothing for a while."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert depot.stderr is not None
    threading.Thread(target=lambda log: [lines.put(line) for line in log], args=(depot.stderr,), daemon=True).start()
    with contextlib.suppress(queue.Empty):
        while text not in (line := lines.get(timeout=QUIET_S)):
            pass
        return line
    return ""


def test_a_second_depot_with_the_same_directory_is_warned_of(
    runtime: Path, serve: Callable[..., "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.cli.running.WAIT_MS", LONG_S * 1000)
    (runtime / "blocks").mkdir()
    (runtime / "link").symlink_to("blocks")

    def posix(name: str, directory: str, pool_gb: float) -> Path:
        path = runtime / f"{name}.yaml"
        path.write_text(f"directories: [{runtime}/{directory}]\npool_gb: {pool_gb}\nposix_capacity_gb: 1\n")
        return path

    first, second, third = posix("one", "blocks", 0.0625), posix("two", "link", 0.125), posix("three", "link", 0.25)
    one = serve("--config", str(first))
    blocks = os.path.realpath(runtime / "blocks")
    # Other depots of this user may run.
    (socket,) = (path for path, user in directory_users() if blocks in user.directories)
    with warned(second) as (two, line):
        found = json.loads(run("doctor", "--config", first, "--json"))["checks"]
        # A depot that does not run yet is warned of, too.
        config = load_config(third, owns_pool=False)
        users = directory_users_with(config, own_socket(config))
    assert "[W]" in line
    for part in (f"pid {two.pid}", f"pid {one.pid}", socket, blocks):
        assert part in line
    (finding,) = (one for one in found if one["check"] == "shared directories")
    assert finding["state"] == "warn"
    assert finding["found"].count(f"both use {blocks}") == 1
    names = [user.name for user in users if blocks in user.directories]
    assert [name.startswith("the depot at") for name in names] == [True, True, False]
