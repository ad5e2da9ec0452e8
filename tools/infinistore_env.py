"""Makes the environment of the wire door's peers: InfiniStore and LMCache, pinned by requirements/infinistore.txt.

Run as ``-m tools.infinistore_env --verbs DIRECTORY [--torch-from ENVIRONMENT] DIRECTORY``, with uv beside the
interpreter that runs it. Nothing is done when lock file and recipe are those of the last run. About 300 MB of disk are
taken.

LMCache needs torch, which weighs ten times all the rest: it is found in vLLM's environment, when that has been made.
Its tests say that they are skipped where it has not.
"""

import argparse
from pathlib import Path

from tools.vllm_env import PYTHON_VERSION, ROOT, digest, once, run, site_packages, step, uv

LOCK = ROOT / "requirements" / "infinistore.txt"
# Read after all other .pth files, so its packages have the lowest precedence.
TORCH = "zz-torch.pth"


def make_environment(directory: Path, verbs: Path) -> None:
    """Installs the lock file's packages; ``verbs`` is the directory of a libibverbs."""
    python = directory / "bin" / "python"
    with step("install InfiniStore and LMCache"):
        run(uv(), "venv", "-q", "--clear", "--no-python-downloads", "--python", PYTHON_VERSION, directory)
        run(uv(), "pip", "install", "-q", "--python", python, "--no-deps", "--compile-bytecode", "-r", LOCK)
    with step("import InfiniStore"):
        # The module is linked with libibverbs, which many systems lack.
        run("env", f"LD_LIBRARY_PATH={verbs}", python, "-c", "import infinistore")


def borrow_torch(directory: Path, lender: Path) -> None:
    """Makes another environment's packages available, after this environment's own."""
    (site_packages(directory) / TORCH).write_text(f"{site_packages(lender)}\n")


def main() -> None:
    """Brings the environment up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--torch-from", type=Path, help="environment that has torch, for LMCache")
    parser.add_argument("--verbs", type=Path, required=True, help="directory of a libibverbs.so.1, or of its stand-in")
    arguments = parser.parse_args()
    directory = arguments.directory.absolute()
    recipe = digest(LOCK, Path(__file__))
    verbs = arguments.verbs.absolute()
    if not once(directory / "kvdepot-recipe", recipe, lambda: make_environment(directory, verbs)):
        print("infinistore-env: up to date")
    # Written each time: the lender may be created, or moved, later.
    if arguments.torch_from:
        borrow_torch(directory, arguments.torch_from.absolute())


if __name__ == "__main__":
    main()
