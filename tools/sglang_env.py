"""Makes the environment of SGLang's tests: a real engine on CPU, pinned by requirements/sglang.txt or another.

Run as ``-m tools.sglang_env [--lock FILE] [--wheel WHEEL] DIRECTORY``, with uv beside the interpreter that runs it.
Nothing is done when lock file, recipe and wheel are those of the last run. About 1 GB is downloaded and 3.5 GB of disk
are taken.

SGLang's kernels need CUDA, or a CPU with AMX: the tests run with the stand-in of tests/with_sglang/standin in front.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tools.vllm_env import (
    PYTHON_VERSION,
    ROOT,
    STUBS,
    digest,
    install_wheel,
    once,
    run,
    site_packages,
    step,
    uv,
)

LOCK = ROOT / "requirements" / "sglang.txt"
EXTENSIONS = "torch-extensions"
HASHES = "sglang/srt/mem_cache/cpp_utils/native_hash.py"
STANDIN = ROOT / "tests" / "with_sglang" / "standin"


def make_environment(directory: Path, lock: Path) -> None:
    """Installs SGLang and its dependencies from the lock file."""
    python = directory / "bin" / "python"
    with step("install SGLang and torch (about 1 GB the first time)"):
        run(uv(), "venv", "-q", "--clear", "--no-python-downloads", "--python", PYTHON_VERSION, directory)
        run(uv(), "pip", "install", "-q", "--python", python, "--no-deps", "-r", lock)
    packages = site_packages(directory)
    with step("build stub CUDA libraries"):
        run(sys.executable, STUBS, packages)
    environ = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(STANDIN)}
    with step("import SGLang"):
        check = "import sglang.srt.mem_cache.hicache_storage"
        subprocess.run([str(python), "-c", check], check=True, env=environ, stdout=subprocess.DEVNULL)
    if (packages / HASHES).exists():
        with step("compile SGLang's page hashes"):
            # SGLang does that at the first request, and a process that is killed meanwhile blocks all later ones.
            path = os.pathsep.join((str(python.parent), os.environ.get("PATH", os.defpath)))
            environ |= {"TORCH_EXTENSIONS_DIR": str(directory / EXTENSIONS), "PATH": path}
            code = "from sglang.srt.mem_cache.cpp_utils import native_hash as one; one._load_native_hash_module()"
            subprocess.run([str(python), "-c", code], check=True, env=environ, stdout=subprocess.DEVNULL)


def main() -> None:
    """Brings the environment up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--lock", type=Path, default=LOCK, help="file with the pinned packages")
    parser.add_argument("--wheel", type=Path, help="wheel of kvdepot to install into it")
    arguments = parser.parse_args()
    directory = arguments.directory.absolute()
    lock = arguments.lock.absolute()
    recipe = digest(lock, STUBS, Path(__file__))
    done = once(directory / "kvdepot-recipe", recipe, lambda: make_environment(directory, lock))
    if arguments.wheel:
        wheel = arguments.wheel.absolute()
        done |= once(directory / "kvdepot-wheel", recipe + digest(wheel), lambda: install_wheel(directory, wheel))
    if not done:
        print("sglang-env: up to date")


if __name__ == "__main__":
    main()
