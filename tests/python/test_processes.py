"""Stores in processes that fork or exit with tasks in flight."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from node import NodeDepot

RUN_S = 120
"""Limit against a hang of the test itself, not a measure of speed."""

PREPARE = """
import os, sys, threading, time, types
import numpy as np
import kvdepot
from kvdepot import _native
from node import NodeDepot
from pathlib import Path

EMBEDDED = {"pipeline": "Cache", "pool_gb": 0.0625, "log_level": "error"}
mode, directory = sys.argv[1], Path(sys.argv[2])

def opened():
    if mode == "embedded":
        return kvdepot.open(EMBEDDED, layout=[4096], namespace={"model": "tiny"})
    return NodeDepot(directory).open([4096], {"model": "tiny"})

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

row = [np.arange(4096).astype(np.uint8)]
store = opened()
dump = store.dump([b"a"], [row])
dump.wait().raise_for_failures()
"""


def python(script: str, mode: str, directory: Path) -> list[str]:
    """Returns a command that runs a script after ``PREPARE``."""
    return [sys.executable, "-c", PREPARE + textwrap.dedent(script), mode, str(directory)]


def environ() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}


def run(script: str, mode: str, directory: Path) -> str:
    """Returns a script's output; it must exit successfully."""
    done = subprocess.run(
        python(script, mode, directory), env=environ(), capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(params=["embedded", "node"])
def mode(request, tmp_path):
    yield request.param
    if request.param == "node":
        depot = NodeDepot(tmp_path)
        depot.open([4096], {"model": "tiny"}).close()
        depot.kill()


def test_a_forked_child_ends_as_any_other(mode, tmp_path):
    script = """
        if (pid := os.fork()) == 0:
            sys.exit(7)
        print(ended(pid))
        # The child's end took nothing from the parent.
        store.load([b"a"], [[np.zeros(4096, np.uint8)]]).wait().raise_for_failures()
        store.close()
    """
    assert run(script, mode, tmp_path) == "7\n"


def test_a_forked_child_closes_although_another_thread_held_the_attachment_s_locks(mode, tmp_path):
    script = """
        depot = store.namespace._on_close.func.__self__
        held, release = threading.Event(), threading.Event()

        def hold():
            with depot._lock:
                held.set()
                release.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        if (pid := os.fork()) == 0:
            store.close()
            depot.close()
            os._exit(7)
        release.set()
        thread.join()
        print(ended(pid))
        store.close()
    """
    assert run(script, mode, tmp_path) == "7\n"


def test_a_forked_child_is_told_at_once_and_opens_a_store_of_its_own(mode, tmp_path):
    script = """
        found = [[np.zeros(4096, np.uint8)]]
        depot, namespace = store._depot, store._native.namespace
        claim = depot.claim([([namespace], 0, 1)], [b"a"], skip=0, limit=1)
        if (pid := os.fork()) == 0:
            calls = {
                "lookup": lambda: store.lookup([b"a"]),
                "prefix": lambda: store.lookup_on_prefix([b"a"]),
                "prefetch": lambda: store.prefetch([b"a"]),
                "dump": lambda: store.dump([b"a"], [row]),
                "load": lambda: store.load([b"a"], found),
                "drain": lambda: store.drain(1),
                "reset": lambda: store.reset(),
                "stats": lambda: store.stats(),
                "done": lambda: dump.done(),
                "wait": lambda: dump.wait(),
                "fileno": lambda: dump.fileno(),
                "poll": lambda: claim.poll(),
                "namespace": lambda: depot.open_canonical(namespace.canonical),
                "close": lambda: depot.close_namespace(namespace),
            }
            for name, call in calls.items():
                try:
                    call()
                    print(name, "was not refused", flush=True)
                except kvdepot.UnavailableError as error:
                    assert f"opened_by_pid {os.getppid()}" in str(error).replace("=", " ").replace(":", " "), error
            assert not store.attached
            claim.release()
            store.close()
            mode = "embedded"
            with opened() as own:
                own.dump([b"b"], [row]).wait().raise_for_failures()
                own.load([b"b"], found).wait().raise_for_failures()
            assert bytes(found[0][0]) == bytes(row[0])
            sys.exit(0)
        print(ended(pid))
        assert claim.wait(60_000)[:2] == (True, 1)
        store.load([b"a"], found).wait().raise_for_failures()
        assert bytes(found[0][0]) == bytes(row[0])
        claim.release()
        store.close()
    """
    assert run(script, mode, tmp_path) == "0\n"


def test_a_forked_child_is_another_member_of_a_shared_ledger(tmp_path):
    """A depot of the child that took part under its parent's name would be declared dead by the parent (P5)."""
    script = """
        shared = {
            **EMBEDDED, "pipeline": "Cache|Posix", "directories": str(directory / "blocks"),
            "posix_capacity_gb": 1, "posix_capacity_shared": True,
        }
        (directory / "blocks").mkdir()

        def members():
            ledgers = [path for path in (directory / "blocks" / ".kvdepot-ledger").iterdir() if path.name.isdigit()]
            return max(ledgers, key=lambda path: int(path.name)).read_bytes()

        def dumped(key):
            with kvdepot.open(shared, layout=[4096], namespace={"model": "tiny"}) as own:
                own.dump([key], [row]).wait().raise_for_failures()
                own.drain(60_000)
                return f"-{os.getpid()}-".encode() in members()

        assert dumped(b"a")
        if (pid := os.fork()) == 0:
            os._exit(7 if dumped(b"b") else 1)
        print(ended(pid))
        store.close()
    """
    assert run(script, "embedded", tmp_path) == "7\n"


def test_a_fork_under_tasks(mode, tmp_path):
    """Locks that other threads hold at the fork are never waited for in the child."""
    script = """
        over = threading.Event()
        def load():
            found = [[np.zeros(4096, np.uint8)]]
            while not over.is_set():
                store.load([b"a"], found).wait().raise_for_failures()
        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            if (pid := os.fork()) == 0:
                try:
                    dump.wait()
                except kvdepot.UnavailableError:
                    store.close()
                    del store, dump, threads
                    os._exit(5)
            assert ended(pid) == 5
        over.set()
        for thread in threads:
            thread.join()
        store.close()
    """
    run(script, mode, tmp_path)


def test_a_forked_child_holds_no_lease_of_a_parent_that_was_killed(tmp_path):
    depot = NodeDepot(tmp_path)
    store = depot.open([4096], {"model": "tiny"})
    script = """
        claim = store._depot.claim([([store._native.namespace], 0, 1)], [b"a"], skip=0, limit=1)
        assert claim.wait(60_000)[:2] == (True, 1)
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            sys.stdin.read()
            os._exit(0)
        time.sleep(600)
    """
    try:
        parent = subprocess.Popen(
            python(script, "node", tmp_path), env=environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with parent:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            assert store.stats()["depot"]["pool_leased_bytes"] > 0
            os.kill(parent.pid, signal.SIGKILL)
            # The child lives, and only it could hold the lease.
            os.kill(child, 0)
            end = RUN_S * 10
            while store.stats()["depot"]["pool_leased_bytes"] > 0:
                end -= 1
                assert end > 0, "the child holds its parent's lease"
                signal.sigtimedwait([], 0.1)
            os.kill(child, 0)
            assert parent.stdin is not None
            parent.stdin.close()
        store.close()
    finally:
        depot.kill()


def test_daemon_threads_that_load_do_not_abort_the_end_of_the_interpreter(tmp_path):
    """Each thread is in a call when the interpreter exits, and returns from it while modules are torn down."""
    script = """
        names = [b"%d" % index for index in range(50_000)]
        found = [[np.zeros(4096, np.uint8)]] * len(names)
        done = store.load(names, found)
        done.wait()
        calls = [done.result] * 4 + [lambda: store.load([b"a"], found[:1]).wait()] * 2
        running = [threading.Event() for _ in calls]
        def loop(call, event):
            while True:
                call()
                event.set()
        for call, event in zip(calls, running):
            threading.Thread(target=loop, args=(call, event), daemon=True).start()
        for event in running:
            event.wait()

        class Slow:
            def __del__(self, sleep=time.sleep, write=os.write):
                sleep(0.3)
                write(1, b"torn down")

        # The module of a script may outlive its interpreter, because daemon threads hold its functions.
        module = types.ModuleType("slow")
        module.slow = Slow()
        sys.modules["slow"] = module
        del module
    """
    assert run(script, "embedded", tmp_path) == "torn down"


def parents(pid: int) -> list[int]:
    """Returns the process's parent, that one's parent, and so on, up to one that has just ended."""
    found = []
    while pid > 1:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            break
        pid = next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))
        found.append(pid)
    return found


def test_a_depot_is_no_descendant_of_the_process_that_started_it(tmp_path):
    """Servers that kill all of their children would end the node's depot."""
    depot = NodeDepot(tmp_path)
    store = depot.open([4096], {"model": "tiny"})
    try:
        # The process between them ends when it has forked, and the depot may serve before that.
        end = time.monotonic() + RUN_S / 2
        # While its ancestors are listed, one of them may end: only a list up to the first process shows all.
        while os.getpid() in (found := parents(depot.pid)) or not found or found[-1] > 1:
            assert time.monotonic() < end, found
            time.sleep(0.01)
        assert os.getsid(depot.pid) != os.getsid(0)
    finally:
        store.close()
        depot.kill()
