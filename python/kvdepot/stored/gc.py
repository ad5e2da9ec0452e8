"""Finds what directories hold that no depot will read again, and removes it. ``docs/format.md`` says what may go.

A namespace's epoch outlives its blocks: it keeps blocks from before a reset unreachable in every tier. So the directory
that says the current epoch stays, unless that is epoch 0, which is also what a namespace without a directory has.
"""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdepot.stored.namespaces import StoredNamespace, find_namespaces

ORPHAN_AGE_S = 3600
CHECKPOINT = ".kvdepot-index"
NO_DESCRIPTION = "there is no namespace.json"
_MARK = re.compile(r"(e|below)(0|[1-9][0-9]{0,9})")
_BLOCK_NAME = re.compile(r"[0-9a-f]{32}\.(kvb|bad)")
_UNKNOWN = "without namespace.json nobody knows whose blocks these are"
_SUBDIRECTORY = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True)
class Garbage:
    """Something that may go.

    Attributes:
        path: a file, or a directory with all that is in it.
        kind: ``old epoch``, ``set aside``, ``temporary``, ``unknown namespace`` or ``empty namespace``.
        why: why nobody needs it.
        bytes: what it takes on the disk.
        namespace: the namespace's name; empty for what belongs to none.
    """

    path: Path
    kind: str
    why: str
    bytes: int
    namespace: str


def find_garbage(directories: Iterable[Path], now_s: float | None = None) -> Iterator[Garbage]:
    """Everything that may go; looks at each file.

    Args:
        directories: directories of a Posix tier, which no depot uses.
        now_s: the time that ages are counted from; now when left out.

    Raises:
        OSError: a directory cannot be read.
    """
    now = time.time() if now_s is None else now_s
    places = list(directories)
    for directory in places:
        yield from _orphans(directory, now, "")
    for namespace in find_namespaces(places):
        for directory in namespace.directories:
            yield from _of_namespace(directory / namespace.root, namespace, now)


def remove(garbage: Garbage) -> int:
    """Removes it; the bytes that were freed. What is gone already frees nothing.

    Raises:
        OSError: it cannot be removed.
    """
    try:
        if garbage.path.is_dir() and not garbage.path.is_symlink():
            shutil.rmtree(garbage.path)
        else:
            garbage.path.unlink()
    except FileNotFoundError:
        return 0
    return garbage.bytes


def remove_blocks(namespace: StoredNamespace) -> tuple[int, int]:
    """Removes a namespace's blocks of all epochs, and its directories where that forgets no epoch.

    The directories' checkpoints go as well: a depot would name blocks by them until it has scanned the files.

    Returns:
        How many files were removed, and their bytes.

    Raises:
        OSError: one cannot be removed.
    """
    files = total = 0
    for directory in namespace.directories:
        root = directory / namespace.root
        (directory / CHECKPOINT).unlink(missing_ok=True)
        for path in _block_files(root):
            with contextlib.suppress(FileNotFoundError):
                total += path.lstat().st_size
                path.unlink()
                files += 1
        if namespace.epoch == 0 and _only_ours(root):
            shutil.rmtree(root)
    return files, total


def _of_namespace(root: Path, namespace: StoredNamespace, now: float) -> Iterator[Garbage]:
    if namespace.problem and namespace.problem != NO_DESCRIPTION:
        return  # of another version, or damaged: a depot that can read it, or writes it anew, may need the blocks
    if namespace.epoch == 0 and _only_ours(root):
        if namespace.problem:
            yield Garbage(root, "unknown namespace", _UNKNOWN, _size(root), namespace.root)
            return
        if not any(True for directory in namespace.directories for _ in _block_files(directory / namespace.root)):
            yield Garbage(root, "empty namespace", "it has no block and was never reset", _size(root), namespace.root)
            return
    marks = _marks(root)
    highest, begun = max((int(mark[2]) for mark, _ in marks), default=0), (root / f"e{namespace.epoch}").is_dir()
    for mark, entry in marks:
        epoch = int(mark[2])
        # What names this directory's highest epoch stays; below<N> may go where e<N> says the same.
        if epoch < min(namespace.epoch, highest) or (mark[1] == "below" and epoch <= namespace.epoch and begun):
            why = f"blocks from before epoch {namespace.epoch}, which no depot reads"
            yield Garbage(entry, "old epoch", why, _size(entry), namespace.root)
        else:
            yield from _in_epoch(entry, namespace, now)
    yield from _orphans(root, now, namespace.root)


def _in_epoch(epoch: Path, namespace: StoredNamespace, now: float) -> Iterator[Garbage]:
    for directory in (epoch, *(one for one in _directories(epoch) if _SUBDIRECTORY.fullmatch(one.name))):
        yield from _orphans(directory, now, namespace.root)
        for path in sorted(directory.glob("*.bad")):
            if _BLOCK_NAME.fullmatch(path.name):
                why = "a broken block that was kept for people"
                yield Garbage(path, "set aside", why, _size(path), namespace.root)
        for path in sorted(directory.glob("*.kvb")) if namespace.problem else ():
            if _BLOCK_NAME.fullmatch(path.name):
                yield Garbage(path, "unknown namespace", _UNKNOWN, _size(path), namespace.root)


def _orphans(directory: Path, now: float, namespace: str) -> Iterator[Garbage]:
    for path in sorted(directory.glob(".*")):
        if not path.name.startswith((".tmp-", ".probe-")):
            continue
        with contextlib.suppress(FileNotFoundError):
            age = now - path.lstat().st_mtime
            if age > ORPHAN_AGE_S:
                why = f"its writer left it {age / ORPHAN_AGE_S:.0f} h ago"
                yield Garbage(path, "temporary", why, _size(path), namespace)


def _marks(root: Path) -> list[tuple[re.Match[str], Path]]:
    found = [(_MARK.fullmatch(one.name), one) for one in _directories(root)]
    return [(mark, one) for mark, one in found if mark]


def _directories(path: Path) -> list[Path]:
    with os.scandir(path) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))


def _block_files(root: Path) -> Iterator[Path]:
    for _, entry in _marks(root):
        yield from _block_files_of(entry)


def _block_files_of(epoch: Path) -> Iterator[Path]:
    for directory in (epoch, *(one for one in _directories(epoch) if _SUBDIRECTORY.fullmatch(one.name))):
        with os.scandir(directory) as entries:
            yield from (Path(entry.path) for entry in entries if _BLOCK_NAME.fullmatch(entry.name))


def _only_ours(root: Path) -> bool:
    """Whether a namespace's directory holds nothing of others."""
    ours = {"namespace.json"} | {path.name for _, path in _marks(root)}
    return all(name in ours or name.startswith((".tmp-", ".probe-")) for name in os.listdir(root))


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        return sum((Path(at) / name).lstat().st_size for at, _, names in os.walk(path) for name in names)
    return 0
