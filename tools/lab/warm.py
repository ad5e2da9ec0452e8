"""A process that has imported vLLM once and forks engines from there: a start takes two seconds instead of twelve.

The process only imports: when it forks, no thread runs and no operator has been computed. A fork ends like any program,
by returning or by a signal, and is a process group of its own.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from tools.lab.child import end_within
from tools.lab.process_group import named_memory, workers

ROOT = Path(__file__).resolve().parents[2]
ON_ALL_CORES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Engines that compute as fast as they can, with as many threads as vLLM chooses."""
ENVIRON = {
    **ON_ALL_CORES,
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    # Threads that spin while they wait for each other lose most of their time on a shared machine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
MODULES = (
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.models.llama",
)
MODULES_OF_DEVICE = {
    "cpu": ("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner"),
    "cuda": ("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner"),
}
END_S = 60.0
START_S = 600.0
LOOK_S = 0.5


class WarmError(Exception):
    """The warm process, or a fork of it, failed."""


class Fork:
    """A program forked from the warm process: ``module.main(argument)``, in a process group of its own."""

    def __init__(self, warm: "Warm", pid: int) -> None:
        self._warm = warm
        self.pid = pid
        self.status: int | None = None
        self._shared: set[Path] = set()

    def wait(self, timeout_s: float) -> int:
        """Returns the exit status, negative for a signal.

        Raises:
            TimeoutError: the program is still running.
        """
        end_s = time.monotonic() + timeout_s
        while self.status is None:
            left_s = max(0.0, end_s - time.monotonic())
            if left_s:
                self._note_shared_memory()
            try:
                self.status = int(self._warm.answer(min(left_s, LOOK_S))["status"])
            except TimeoutError:
                if not left_s:
                    raise
        return self.status

    def kill(self) -> None:
        """Sends SIGKILL to the whole group."""
        if self.status is None:
            self._note_shared_memory()
            os.killpg(self.pid, signal.SIGKILL)

    def kill_worker(self, number: int) -> bool:
        """Sends SIGKILL to one of the program's own workers, an engine's ranks. Returns false if there are none."""
        self._note_shared_memory()
        found = workers(self.pid) if self.status is None else []
        if not found:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(found[number % len(found)], signal.SIGKILL)
        return True

    def _note_shared_memory(self) -> None:
        """Records the group's named shared memory: vLLM leaves some of it behind, however it ends."""
        self._shared |= named_memory(self.pid)

    def end(self) -> None:
        """Kills whatever is left of the group, and waits for the program."""
        with contextlib.suppress(ProcessLookupError):
            self._note_shared_memory()
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(END_S)
        for name in self._shared:
            name.unlink(missing_ok=True)


class Warm:
    """The warm process, seen from outside. It runs one fork at a time."""

    def __init__(self, log: Path, python: str = sys.executable, environ: Mapping[str, str] = ENVIRON) -> None:
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [python, "-m", "tools.lab.warm"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                bufsize=0,  # what select() sees is all that there is
                cwd=ROOT,
                env={**os.environ, **environ},
                start_new_session=True,
            )

    def start(self, module: str, argument: Any, log: Path, environ: Mapping[str, str], cwd: Path) -> Fork:
        """Forks a program whose output goes to ``log``."""
        order = {"module": module, "argument": argument, "log": str(log), "environ": dict(environ), "cwd": str(cwd)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return Fork(self, int(self.answer(START_S)["pid"]))

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Returns the next line of the warm process.

        Raises:
            TimeoutError: there was none in time.
            WarmError: the process has ended.
        """
        output = self._process.stdout
        assert output is not None
        if not select.select([output], [], [], timeout_s)[0]:
            raise TimeoutError(f"no answer within {timeout_s:.0f} s")
        line = output.readline()
        if not line:
            raise WarmError(f"the warm process has ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends the process and its forks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        end_within(self._process, END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _become(order: dict[str, Any], answers: int) -> None:
    """Runs in the fork: turns the process into the ordered program."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    for descriptor in (log, null, answers):
        os.close(descriptor)
    os.environ.update(order["environ"])
    os.chdir(order["cwd"])
    # What an interpreter would do at its start in such an environment.
    for entry in reversed([entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]):
        if entry not in sys.path:
            sys.path.insert(0, entry)
            if os.path.exists(os.path.join(entry, "sitecustomize.py")):
                sys.modules.pop("sitecustomize", None)
                importlib.import_module("sitecustomize")
    # Ranks are forked, too, which vLLM does itself except on CPUs: there, each would import everything again.
    executor = importlib.import_module("vllm.v1.executor.multiproc_executor")
    executor.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]
    # Ranks that wait for each other by sched_yield block all others for up to 30 s on two processors
    # (docs/operate.md, "The depot is starved of CPU"). This is how vLLM waits under older Pythons.
    importlib.import_module("vllm.distributed.utils").USE_SCHED_YIELD = False  # type: ignore[attr-defined]
    # vLLM has already handed its stream to its log handlers; both write to the same descriptors.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # What was inherited stays frozen when an engine ends and undoes its own freeze (see `main`).
    gc.unfreeze = lambda: None
    importlib.import_module(order["module"]).main(order["argument"])


class Forker:
    """The warm process, seen from inside."""

    def __init__(self) -> None:
        self._orders, self._answers = os.dup(0), os.dup(1)
        os.dup2(2, 1)
        self._wake, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._child = 0

    def run(self) -> None:
        """Forks on demand until its standard input ends. Also returns in every fork that has done its work."""
        pending = b""
        while True:
            ready, _, _ = select.select([self._orders, self._wake], [], [])
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._reap()
            if self._orders not in ready:
                continue
            got = os.read(self._orders, 1 << 16)
            if not got:
                break
            *lines, pending = (pending + got).split(b"\n")
            for line in lines:
                if self._fork(json.loads(line)):
                    return
        if self._child:
            os.killpg(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)

    def _fork(self, order: dict[str, Any]) -> bool:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os.close(self._orders)
            os.close(self._wake)
            _become(order, self._answers)
            return True
        # Both sides do it, as shells do: the group exists before its id is sent.
        os.setpgid(child, child)
        self._child = child
        self._answer(pid=child)
        return False

    def _reap(self) -> None:
        found, status = os.waitpid(self._child, os.WNOHANG) if self._child else (0, 0)
        if found:
            self._child = 0
            self._answer(status=os.waitstatus_to_exitcode(status))

    def _answer(self, **values: int) -> None:
        os.write(self._answers, json.dumps(values).encode() + b"\n")


def main() -> None:
    """Imports, then serves."""
    forker = Forker()
    for module in MODULES:
        importlib.import_module(module)
    platform = importlib.import_module("vllm.platforms").current_platform
    for module in MODULES_OF_DEVICE[platform.device_type]:
        importlib.import_module(module)
    # An engine collects garbage at its start and at its end. To look at what it has inherited would copy that.
    gc.collect()
    gc.freeze()
    forker.run()


if __name__ == "__main__":
    main()
