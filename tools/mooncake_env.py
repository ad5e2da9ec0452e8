"""Makes the environment of the Mooncake tests: Mooncake's master and client, pinned by requirements/mooncake.txt.

Run as ``-m tools.mooncake_env DIRECTORY``, with uv beside the interpreter that runs it. Nothing is done when lock file
and recipe are those of the last run. About 300 MB of disk are taken. ``DIRECTORY/lib-verbs`` has a libibverbs without
devices, which Mooncake's package needs where the system has none: put it into LD_LIBRARY_PATH. If the package cannot be
imported all the same, ``DIRECTORY/cannot-run`` says why; with KVDEPOT_REQUIRE_MOONCAKE=1 that is an error.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tools.vllm_env import PYTHON_VERSION, ROOT, digest, once, run, step, uv

LOCK = ROOT / "requirements" / "mooncake.txt"
VERBS = ROOT / "tools" / "mooncake" / "no_verbs.c"
VERSIONS = VERBS.with_suffix(".map")
# Mooncake's package expects these of the system, too.
SYSTEM = "libnuma.so.1 and libcurl.so.4 (Debian: libnuma1, libcurl4)"


def make_environment(directory: Path) -> None:
    """Installs the lock file's packages, and builds the stand-in."""
    python, verbs = directory / "bin" / "python", directory / "lib-verbs"
    with step("install Mooncake"):
        run(uv(), "venv", "-q", "--clear", "--no-python-downloads", "--python", PYTHON_VERSION, directory)
        run(uv(), "pip", "install", "-q", "--python", python, "--no-deps", "--compile-bytecode", "-r", LOCK)
    with step("import Mooncake"):
        verbs.mkdir()
        script = f"-Wl,--version-script={VERSIONS}"
        run("cc", "-shared", "-fPIC", "-O1", script, "-o", verbs / "libibverbs.so.1", VERBS)
        check(directory)


def check(directory: Path) -> None:
    """Records whether this system has the libraries that the package needs."""
    note = directory / "cannot-run"
    python = directory / "bin" / "python"
    try:
        run("env", f"LD_LIBRARY_PATH={directory / 'lib-verbs'}", python, "-c", "import mooncake.store")
        note.unlink(missing_ok=True)
    except subprocess.CalledProcessError:
        reason = f"Mooncake's package cannot be imported here: it needs {SYSTEM}"
        note.write_text(f"{reason}\n")
        if os.environ.get("KVDEPOT_REQUIRE_MOONCAKE"):
            sys.exit(reason)


def main() -> None:
    """Brings the environment up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory.absolute()
    recipe = digest(LOCK, Path(__file__), VERBS, VERSIONS)
    if not once(directory / "kvdepot-recipe", recipe, lambda: make_environment(directory)):
        print("mooncake-env: up to date")
        if (directory / "cannot-run").exists():
            check(directory)


if __name__ == "__main__":
    main()
