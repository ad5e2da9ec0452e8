"""P14: every documented command runs, in the small form of `table.py`."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from collect import ROOT
from table import RUNS, Run, Serve

from tools.lab.ports import free_port

RUN_S = 600
READY_S = 120
POLL_S = 0.1
BIN = ROOT / ".venv" / "bin"
STANDINS = {"libcuda.so.1": "cuda/libcuda.so.1", "libibverbs.so.1": "libibverbs.so.1"}
BUILT = ROOT / ".work" / "standin"


@pytest.fixture(scope="session")
def standins(tmp_path_factory):
    """Directories with the stand-ins for the drivers, under the names that processes look for."""
    found = {}
    for name, built in STANDINS.items():
        assert (BUILT / built).is_file(), f"{built} is missing: run make test-docs, which builds it"
        place = tmp_path_factory.mktemp("standin")
        shutil.copy(BUILT / built, place / name)
        found[name] = place
    return found


@pytest.fixture
def shell(tmp_path, standins):
    """Starts a command of the table in a shell."""
    ports = free_port(), free_port()
    places = {
        "tmp": tmp_path,
        "root": ROOT,
        "port": ports[0],
        "port2": ports[1],
        "standin_cuda": standins["libcuda.so.1"],
        "standin_verbs": standins["libibverbs.so.1"],
    }

    def fill(text):
        return text.format(**places)

    def start(command, environ, **options):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "KVDEPOT_"))}
        # The user's depots and configurations must not take part.
        own = {"XDG_RUNTIME_DIR": tmp_path, "XDG_CACHE_HOME": tmp_path, "PATH": f"{BIN}:{os.environ['PATH']}"}
        whole = {**inherited, **{name: str(value) for name, value in own.items()}, **environ}
        return subprocess.Popen(
            ["bash", "-c", f"exec {command}" if "&&" not in command else command],
            cwd=ROOT,
            env=whole,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            **options,
        )

    start.fill, start.ports = fill, ports
    return start


def finished(process, seconds):
    """Returns the output of a process that exits on its own; on timeout its whole group is killed."""
    try:
        return process.communicate(timeout=seconds)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def run_to_end(shell, command, environ):
    process = shell(command, environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = finished(process, RUN_S)
    return process.returncode, output, errors


def marked(run):
    return pytest.param(run, id=run.name, marks=[pytest.mark.vllm] if run.vllm else [])


@pytest.mark.timeout(RUN_S + 60)
@pytest.mark.parametrize("run", [marked(one) for one in RUNS if isinstance(one, Run)])
def test_a_command_ends_as_it_should(run, shell):
    environ = {name: shell.fill(value) for name, value in run.environ.items()}
    status, output, errors = run_to_end(shell, shell.fill(run.command), environ)
    assert status == run.status, f"{run.command}\n{output[-4000:]}\n{errors[-4000:]}"
    assert run.says in output
    if run.json:
        json.loads(output[min(at for at in (output.find("{"), output.find("[")) if at >= 0) :])


@pytest.mark.timeout(RUN_S + 60)
@pytest.mark.parametrize("run", [one for one in RUNS if isinstance(one, Serve)], ids=lambda run: run.name)
def test_a_depot_serves_until_it_is_told_to_end(run, shell, tmp_path):
    (tmp_path / "blocks").mkdir()
    for name, text in run.files.items():
        (tmp_path / name).write_text(shell.fill(text))
    environ = {"LD_LIBRARY_PATH": shell.fill("{standin_verbs}")} if run.rdma else {}
    if run.before:
        if shutil.which(run.before.split()[0]) is None:
            pytest.skip(f"no {run.before.split()[0]} here")
        status, _, errors = run_to_end(shell, shell.fill(run.before), environ)
        assert status == 0, errors
    log = tmp_path / "served.log"
    with log.open("w") as file:
        depot = shell(shell.fill(run.command), environ, stdout=file, stderr=file)
    try:
        until = time.monotonic() + READY_S
        while True:
            assert depot.poll() is None, f"{run.command}\n{log.read_text()}"
            status, output, errors = run_to_end(shell, shell.fill(run.stat), environ)
            if status == 0:
                break
            assert time.monotonic() < until, f"{errors}\n{log.read_text()}"
            time.sleep(POLL_S)
        assert "pool" in output
        for port in shell.ports if run.wire else ():
            with socket.create_connection(("127.0.0.1", port), READY_S):
                pass
        while run.rdma and "RDMA is served" not in log.read_text():
            assert time.monotonic() < until, log.read_text()
            time.sleep(POLL_S)
        os.killpg(depot.pid, signal.SIGTERM)
        assert depot.wait(READY_S) == 0, log.read_text()
    finally:
        if depot.poll() is None:
            os.killpg(depot.pid, signal.SIGKILL)
            depot.wait()


def test_the_installed_command_is_this_tree_s():
    assert sys.prefix == str(ROOT / ".venv"), "run by make test-docs"
