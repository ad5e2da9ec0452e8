"""KVDepotLinker with a fault at the worst moment: after a hit was taken, and before its copy begins.

SGLang loads it like the linker itself (``linker_module_path``). The fault happens once for each file ``TRAP`` names,
which has a signal and the process that gets it: in the first of several ranks that loads.
"""

import os
import select
import signal
from pathlib import Path

from kvdepot.engines.sglang import KVDepotLinker
from tools.lab.pause import pause

TRAP = "KVDEPOT_TEST_TRAP"
ENDS_MS = 60_000


def spring(trap: Path) -> None:
    """Takes the trap away, sends its signal, and waits until that has taken effect, unless another rank was first."""
    own = trap.with_name(f"{trap.name}-{os.getpid()}")
    try:
        trap.rename(own)
    except FileNotFoundError:
        return
    name, number = own.read_text().split()
    pid = int(number)
    if name == "SIGSTOP":
        pause(pid)
    else:
        process = os.pidfd_open(pid)
        os.kill(pid, signal.Signals[name])
        ended = select.poll()
        ended.register(process, select.POLLIN)
        if not ended.poll(ENDS_MS):
            raise TimeoutError(f"process {pid} has not ended")
        os.close(process)
    own.unlink()


class FaultyLinker(KVDepotLinker):
    """The linker, with that fault."""

    def start_layer_wise_loading(self) -> int:
        """The same as the linker's, after the fault if there is something to load."""
        trap = Path(os.environ[TRAP])
        if self._queued and trap.exists():
            spring(trap)
        return super().start_layer_wise_loading()
