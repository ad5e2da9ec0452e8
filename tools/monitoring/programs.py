"""The real programs of the monitoring tests, Chromium and Prometheus, from the system's packages.

``python -m tools.monitoring.programs`` installs what is missing, by apt-get and only as root. Elsewhere it says what to
install. KVDEPOT_CHROMIUM and KVDEPOT_PROMETHEUS name programs that are not on the path; promtool is beside Prometheus.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHROMIUM, PROMETHEUS = "KVDEPOT_CHROMIUM", "KVDEPOT_PROMETHEUS"
# By the variable that names a program: its names on the path.
NAMES = {CHROMIUM: ("chromium", "chromium-browser", "google-chrome"), PROMETHEUS: ("prometheus",)}
# Of Debian and its relatives. The fonts are what the screenshots are set in.
PACKAGES = ("chromium", "prometheus", "fonts-dejavu-core")
POLICY = Path("/usr/sbin/policy-rc.d")


class MissingProgramError(Exception):
    """A program is not there; the message says how to get it."""


def program(variable: str) -> Path:
    """Returns a program: what the variable names, or the first one on the path.

    Raises:
        MissingProgramError: there is none.
    """
    named = os.environ.get(variable)
    names = (named,) if named else NAMES[variable]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        hint = f"install the packages {' '.join(PACKAGES)}, or name it by {variable}"
        raise MissingProgramError(f"there is no {names[0]}: {hint}")
    return Path(found)


def chromium() -> Path:
    """Returns the browser."""
    return program(CHROMIUM)


def prometheus() -> Path:
    """Returns the server."""
    return program(PROMETHEUS)


def promtool() -> Path:
    """Returns the program that checks rules.

    Raises:
        MissingProgramError: it is not beside the server.
    """
    found = prometheus().resolve().with_name("promtool")
    if not found.exists():
        raise MissingProgramError(f"there is no {found}: it belongs to the package of Prometheus")
    return found


@contextmanager
def without_services() -> Iterator[None]:
    """Keeps packages from starting services while they are installed, unless the machine has a rule of its own."""
    ours = not POLICY.exists()
    if ours:
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            POLICY.unlink()


def install() -> None:
    """Installs the packages. Nothing of them runs afterwards."""
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with without_services():
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
            subprocess.run(["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *command], check=True, env=environ)


def missing() -> str:
    """Returns what is missing, and an empty text if nothing is."""
    try:
        chromium(), promtool()
    except MissingProgramError as error:
        return str(error)
    return ""


def main() -> int:
    """Installs what is missing, where that is possible."""
    if missing() and os.geteuid() == 0 and shutil.which("apt-get"):
        install()
    if why := missing():
        print(why, file=sys.stderr)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
