"""Names of other projects that existing launch commands use, installed only on request.

A wheel cannot make a console script or a package optional, and a second distribution would silently overwrite files of
the real one. So ``kvdepot compat install`` writes a few files into this environment, after checking that the name is
free, and ``kvdepot compat remove`` deletes them again.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvdepot.errors import ConfigError

MARK = "Written by `kvdepot compat install"
HEAD_BYTES = 400
"""Number of leading bytes of a file to search for the mark."""

_HEADER = f"# {MARK} {{name}}`; `kvdepot compat remove {{name}}` takes it away.\n"

_CONNECTOR = '''\
"""The module path of existing launch lines: kvdepot's connector."""

from kvdepot.engines import vllm as _vllm


def __getattr__(name: str) -> object:
    if name != "UCMConnector":
        raise AttributeError(f"module {__name__!r} of kvdepot has UCMConnector only, not {name!r}")
    return _vllm.UCMConnector
'''

_LAUNCHER = """\
import sys

from kvdepot.cli.infinistore import main

sys.exit(main())
"""


@dataclass(frozen=True)
class Shim:
    """A set of files that provides one foreign name.

    Attributes:
        gives: description of what the name provides.
        module: top-level module that must not exist before the installation; empty = the shim has none.
        distributions: names of the distributions that own the name.
        files: content to write, by path below ``where``; for a text of "" the file has the header alone.
        where: key of ``sysconfig``'s paths.
        is_program: whether the files are executable.
    """

    name: str
    gives: str
    distributions: tuple[str, ...]
    files: Mapping[str, str]
    where: str
    module: str = ""
    is_program: bool = False

    def directory(self) -> Path:
        """Returns the directory of this environment that the files go into."""
        return Path(sysconfig.get_path(self.where))

    def paths(self) -> list[Path]:
        """Returns the paths of the shim's files."""
        return [self.directory() / name for name in self.files]

    def is_installed(self) -> bool:
        """Returns whether all of its files exist and were written by kvdepot."""
        return all(is_own(path) for path in self.paths())


SHIMS: Mapping[str, Shim] = {
    shim.name: shim
    for shim in (
        Shim(
            name="infinistore",
            gives="the command `infinistore`, which is `kvdepot serve` with the network listener",
            distributions=("infinistore",),
            files={"infinistore": _LAUNCHER},
            where="scripts",
            is_program=True,
        ),
        Shim(
            name="ucm",
            gives="the module path `ucm.integration.vllm.ucm_connector`, which is kvdepot's connector",
            distributions=("uc-manager", "ucm", "unified-cache-management"),
            files={
                "ucm/__init__.py": "",
                "ucm/integration/__init__.py": "",
                "ucm/integration/vllm/__init__.py": "",
                "ucm/integration/vllm/ucm_connector.py": _CONNECTOR,
            },
            where="purelib",
            module="ucm",
        ),
    )
}
"""Shims that can be installed, by name."""


def is_own(path: Path) -> bool:
    """Returns whether kvdepot wrote the file."""
    try:
        with path.open("rb") as file:
            return MARK.encode() in file.read(HEAD_BYTES)
    except OSError:
        return False


def install(shim: Shim) -> list[Path]:
    """Writes a shim's files, replacing those that kvdepot wrote earlier. Returns their paths.

    Raises:
        ConfigError: another package or program has the name, or the environment is not writable.
    """
    taken = _taken_by(shim)
    if taken:
        raise ConfigError(f"{shim.name}: not installed, because it conflicts with {taken}: remove that first")
    for path, text in zip(shim.paths(), shim.files.values(), strict=True):
        _write(shim, path, text)
    importlib.invalidate_caches()
    return shim.paths()


def _write(shim: Shim, path: Path, text: str) -> None:
    shebang = f"#!{sys.executable}\n" if shim.is_program else ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Replaced atomically: an engine may be starting.
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_text(shebang + _HEADER.format(name=shim.name) + text, encoding="utf-8")
        fresh.chmod(0o755 if shim.is_program else 0o644)
        fresh.replace(path)
    except OSError as error:
        raise ConfigError(f"{shim.name}: cannot write {path}: {error.strerror or error}") from error


def remove(shim: Shim) -> list[Path]:
    """Removes the files that ``install`` wrote, and directories that are then empty. Returns the removed paths.

    Raises:
        ConfigError: a file cannot be removed.
    """
    gone = []
    for path in reversed(shim.paths()):
        if not is_own(path):
            continue
        _unlink(shim, path)
        gone.append(path)
        _remove_empty(path.parent, shim.directory())
    importlib.invalidate_caches()
    return gone


def _unlink(shim: Shim, path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        raise ConfigError(f"{shim.name}: cannot remove {path}: {error.strerror or error}") from error


def _remove_empty(directory: Path, above: Path) -> None:
    while directory != above:
        shutil.rmtree(directory / "__pycache__", ignore_errors=True)
        try:
            directory.rmdir()
        except OSError:  # it holds a foreign file
            return
        directory = directory.parent


def _taken_by(shim: Shim) -> str:
    """Returns who owns the name, as text for an error; empty if it is free."""
    for found in importlib.metadata.distributions():
        if str(found.metadata["Name"]).lower().replace("_", "-") in shim.distributions:
            return f"the package {found.metadata['Name']} {found.version}"
    for path in shim.paths():
        if os.path.lexists(path) and not is_own(path):
            return str(path)
    if shim.is_program:
        program = shutil.which(shim.name)
        return f"the program {program}" if program and not is_own(Path(program)) else ""
    directory = shim.directory() / shim.module
    if os.path.lexists(directory) and not _is_own_directory(directory):
        return f"the directory {directory}"
    spec = importlib.util.find_spec(shim.module)
    if spec is None:
        return ""
    places = [Path(place) for place in spec.submodule_search_locations or ()] or [Path(spec.origin or shim.module)]
    foreign = [place for place in places if place != directory]
    return f"the module {foreign[0]}" if foreign else ""


def _is_own_directory(directory: Path) -> bool:
    """Returns whether kvdepot created a module's directory.

    Rejects a namespace package, which has no ``__init__.py`` of ours: ours would turn it into a regular package.
    """
    if directory.is_symlink() or not directory.is_dir():
        return False
    if is_own(directory / "__init__.py"):
        return True
    # An interrupted installation leaves directories and files of ours.
    files = (path for path in directory.rglob("*") if "__pycache__" not in path.parts)
    return all(is_own(path) for path in files if path.is_symlink() or not path.is_dir())
