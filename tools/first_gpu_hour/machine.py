"""The machine's resources that the steps need."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STANDIN_NAME = "stand-in"
DOCTOR = (sys.executable, "-m", "kvdepot", "doctor", "--json")
DOCTOR_S = 120
PROGRAMS = ("nvidia-smi", "cargo", "compute-sanitizer", "nsys", "ibv_devinfo", "make")
PACKAGES = ("vllm",)


@dataclass(frozen=True)
class Machine:
    """Devices and programs.

    Attributes:
        devices: names of the CUDA devices; empty if there is a ``problem``.
        problem: why there is no device.
        adapters: names of the RDMA adapters.
        programs: the installed ones of ``PROGRAMS``, and of the Python packages ``PACKAGES``.
        environ: environment of every step.
    """

    devices: tuple[str, ...]
    problem: str
    adapters: tuple[str, ...]
    programs: tuple[str, ...]
    environ: dict[str, str]

    @property
    def is_standin(self) -> bool:
        """Whether the driver is the stand-in for tests: its figures say nothing about any device."""
        return any(name.startswith(STANDIN_NAME) for name in self.devices)

    def lacks(self, need: str) -> str:
        """Returns why a step that needs this cannot run here; empty if it can."""
        if need == "device":
            return "" if self.devices else f"no GPU: {self.problem}"
        if need == "gpu":
            return "the driver is a stand-in" if self.is_standin else self.lacks("device")
        if need == "adapter":
            return "" if self.adapters else "no RDMA adapter"
        return "" if need in self.programs else f"{need} is not installed"


def look(driver: Path | None, cache: Path) -> Machine:
    """Inspects this machine by ``kvdepot doctor``, with another CUDA driver if one is given."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(cache), "KVDEPOT_LOG": "debug"}
    if driver is not None:
        environ["LD_LIBRARY_PATH"] = f"{driver.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    packages = (name for name in PACKAGES if importlib.util.find_spec(name))
    programs = (*(name for name in PROGRAMS if shutil.which(name)), *packages)
    try:
        done = subprocess.run(
            DOCTOR,
            env=environ,
            capture_output=True,
            text=True,
            timeout=DOCTOR_S,
            check=False,  # 1 = a check failed, and the devices are described all the same
        )
        report = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        return Machine((), f"kvdepot doctor failed: {error}", (), programs, environ)
    names = tuple(one["device"]["name"] for one in report["devices"])
    return Machine(names, report["problem"] or "", tuple(report["adapters"]), programs, environ)
