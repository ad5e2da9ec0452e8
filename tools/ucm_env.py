"""Makes the environment of UCM, for `make bench-peers`: its released wheel, pinned by requirements/ucm.txt.

Run as ``-m tools.ucm_env DIRECTORY``, with uv beside the interpreter that runs it. Nothing is done when lock file and
recipe are those of the last run. ``DIRECTORY/lib-cuda`` has a stand-in for the CUDA runtime that the wheel is linked
with, on which a device's memory is the host's: put it into LD_LIBRARY_PATH. If the wheel cannot be used here,
``DIRECTORY/cannot-run`` says why.
"""

import argparse
import os
import subprocess
from pathlib import Path

from tools.vllm_env import ROOT, digest, once, run, step, uv

LOCK = ROOT / "requirements" / "ucm.txt"
RUNTIME = ROOT / "tools" / "ucm" / "cudart.c"
VERSIONS = RUNTIME.with_suffix(".map")
# The only one that the wheel is built for.
PYTHON_VERSION = "3.12"


def make_environment(directory: Path) -> None:
    """Installs the wheel, and builds the stand-in."""
    note = directory / "cannot-run"
    python, cuda = directory / "bin" / "python", directory / "lib-cuda"
    with step("install UCM"):
        command: list[str | Path] = [
            uv(),
            "venv",
            "-q",
            "--clear",
            "--no-python-downloads",
            "--python",
            PYTHON_VERSION,
            directory,
        ]
        # pyenv's python3.12 runs only where that version is selected.
        found = subprocess.run(command, check=False, env={**os.environ, "PYENV_VERSION": PYTHON_VERSION})
        if found.returncode != 0:
            directory.mkdir(exist_ok=True)
            note.write_text(f"UCM's wheel needs Python {PYTHON_VERSION}, which is not installed here\n")
            return
        run(uv(), "pip", "install", "-q", "--python", python, "--no-deps", "-r", LOCK)
    with step("build a stand-in for the CUDA runtime"):
        cuda.mkdir()
        script = f"-Wl,--version-script={VERSIONS}"
        target = cuda / "libcudart.so.12"
        run("cc", "-shared", "-fPIC", "-O2", "-pthread", f"-Wl,-soname,{target.name}", script, "-o", target, RUNTIME)


def main() -> None:
    """Brings the environment up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory.absolute()
    recipe = digest(LOCK, Path(__file__), RUNTIME, VERSIONS)
    if not once(directory / "kvdepot-recipe", recipe, lambda: make_environment(directory)):
        print("ucm-env: up to date")


if __name__ == "__main__":
    main()
