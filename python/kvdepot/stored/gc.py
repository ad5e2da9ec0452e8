"""Finds and removes files in directories that no depot will read again. ``docs/format.md`` says what may be removed.

A namespace's epoch outlives its blocks: it keeps blocks from before a reset unreachable in every tier. So the directory
that records the current epoch stays, unless that is epoch 0, which a namespace without a directory has, too.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdepot.stored.namespaces import StoredNamespace, find_namespaces
from kvdepot.stored.temporaries import is_orphan, is_ours

CHECKPOINT = ".kvdepot-index"
DESCRIPTION = "namespace.json"
TEMPORARY, UNKNOWN, EMPTY, COLD = "temporary", "unknown namespace", "empty namespace", "cold"
PAGE_BYTES = 4096
"""A file counts against a capacity in whole pages, as in a depot."""
NO_DESCRIPTION = "there is no namespace.json"
_MARK = re.compile(r"(e|below)(0|[1-9][0-9]{0,9})")
_BLOCK_NAME = re.compile(r"[0-9a-f]{32}\.(kvb|bad)")
_UNKNOWN_WHY = "there is no namespace.json: a depot that opens the namespace writes it anew and finds the blocks"
_SUBDIRECTORY = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True)
class Garbage:
    """Something that may be removed.

    Attributes:
        path: a file, or a directory with its content.
        kind: ``old epoch``, ``set aside``, ``temporary``, ``unknown namespace``, ``empty namespace`` or ``cold``.
        why: why it is not needed.
        bytes: space that it takes on disk.
        namespace: the namespace's name; empty if it belongs to none.
        used_ns: when a cold block was last used, in ns since the epoch; otherwise 0.
    """

    path: Path
    kind: str
    why: str
    bytes: int
    namespace: str
    used_ns: int = 0


def find_garbage(directories: Iterable[Path], now_s: float | None = None) -> Iterator[Garbage]:
    """Yields everything that may be removed; reads the metadata of each file.

    Args:
        directories: directories of a Posix tier, which no depot uses.
        now_s: time that ages are relative to; now when left out.

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


def find_cold(
    directories: Iterable[Path],
    capacity_bytes: int,
    now_s: float | None = None,
    told: Callable[[int], object] = lambda _: None,
) -> list[Garbage]:
    """Returns the blocks that do not fit into a capacity, those used longest ago first.

    Reads the metadata of each block of a current epoch. A depot keeps the time of a block's last use, to a minute, as
    its file's modification time. A depot's own capacity also covers blocks without a readable ``namespace.json``, and
    it keeps a little space free, so it may evict more.

    Args:
        directories: directories of a Posix tier, which no depot uses.
        capacity_bytes: bytes that the blocks in all of them together may take.
        now_s: time that ages are relative to; now when left out.
        told: called with the number of each step's blocks, whether they fit or not.

    Raises:
        OSError: a directory cannot be read.
    """
    now = time.time() if now_s is None else now_s
    blocks = []
    for namespace in find_namespaces(list(directories)):
        for path in () if namespace.problem else _current_blocks(namespace):
            told(1)
            with contextlib.suppress(FileNotFoundError):
                facts = path.lstat()
                if stat.S_ISREG(facts.st_mode):
                    blocks.append((facts.st_mtime_ns, facts.st_size, str(path), namespace.root))
    over = sum(_whole_pages(size) for _, size, _, _ in blocks) - capacity_bytes
    blocks.sort()
    cold = []
    for used_ns, size, path_text, root in blocks:
        if over <= 0:
            break
        over -= _whole_pages(size)
        why = f"last used {max(0.0, now - used_ns / 1e9) / 3600:.1f} h ago: beyond the capacity"
        cold.append(Garbage(Path(path_text), COLD, why, size, root, used_ns))
    return cold


def _current_blocks(namespace: StoredNamespace) -> Iterator[Path]:
    for directory in namespace.directories:
        epoch = directory / namespace.root / f"e{namespace.epoch}"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            yield from (path for path in _block_files_of(epoch) if path.suffix == ".kvb")


def remove(garbage: Garbage, directories: Iterable[Path], now_s: float | None = None) -> int:
    """Removes garbage if it is still unused. Returns the bytes freed: 0 if it is gone, or in use again.

    Args:
        garbage: a result of ``find_garbage``, or of ``find_cold`` after ``forget_checkpoints``.
        directories: as for ``find_garbage``.
        now_s: time that ages are relative to; now when left out.

    Raises:
        OSError: it cannot be removed.
    """
    path, now = garbage.path, time.time() if now_s is None else now_s
    try:
        if garbage.kind == TEMPORARY and not _is_orphan(path, now):
            return 0
        if garbage.kind == COLD:
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode) or facts.st_mtime_ns != garbage.used_ns:
                return 0
        if garbage.kind == UNKNOWN and any((one / garbage.namespace / DESCRIPTION).exists() for one in directories):
            return 0
        if garbage.kind == UNKNOWN and path.is_dir():
            for file in _block_files(path):
                file.unlink(missing_ok=True)
            _remove_empty(path, now)
            return garbage.bytes
        if garbage.kind == EMPTY:
            return garbage.bytes if _remove_empty(path, now) else 0
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return 0
    return garbage.bytes


def forget_checkpoints(directories: Iterable[Path]) -> None:
    """Removes the directories' checkpoints: a depot would list removed blocks by them until it has scanned the files.

    Raises:
        OSError: one cannot be removed.
    """
    for directory in directories:
        (directory / CHECKPOINT).unlink(missing_ok=True)


def remove_blocks(namespace: StoredNamespace, told: Callable[[int], object] = lambda _: None) -> tuple[int, int]:
    """Removes a namespace's blocks of all epochs, and its directories unless that would lose an epoch.

    The directories' checkpoints are removed as well: a depot would list blocks by them until it has scanned the files.

    Args:
        namespace: the namespace.
        told: called with the number of files that each step removed.

    Returns:
        Number of removed files, and their bytes.

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
                told(1)
        if namespace.epoch == 0 and _only_ours(root):
            with contextlib.suppress(FileNotFoundError):
                _remove_empty(root, time.time())
    return files, total


def _remove_empty(root: Path, now: float) -> bool:
    """Removes a namespace's directory, unless it now has a block, a later epoch or a foreign file."""
    marks = _marks(root)
    if any(int(mark[2]) for mark, _ in marks) or not _only_ours(root):
        return False
    try:
        for _, epoch in marks:
            for directory in (*(one for one in _directories(epoch) if _SUBDIRECTORY.fullmatch(one.name)), epoch):
                _remove_orphans(directory, now)
                directory.rmdir()
        _remove_orphans(root, now)
        (root / DESCRIPTION).unlink(missing_ok=True)
        root.rmdir()
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            return False
        raise
    return True


def _remove_orphans(directory: Path, now: float) -> None:
    for orphan in _orphans(directory, now, ""):
        remove(orphan, (), now)


def _of_namespace(root: Path, namespace: StoredNamespace, now: float) -> Iterator[Garbage]:
    if namespace.problem and namespace.problem != NO_DESCRIPTION:
        return  # of another version, or damaged: a depot that can read it, or rewrites it, may need the blocks
    if namespace.epoch == 0 and _only_ours(root):
        if not any(True for directory in namespace.directories for _ in _block_files(directory / namespace.root)):
            yield Garbage(root, EMPTY, "it has no block and was never reset", _size(root), namespace.root)
            return
        if namespace.problem:
            yield Garbage(root, UNKNOWN, _UNKNOWN_WHY, _size(root), namespace.root)
            return
    marks = _marks(root)
    highest, begun = max((int(mark[2]) for mark, _ in marks), default=0), (root / f"e{namespace.epoch}").is_dir()
    for mark, entry in marks:
        epoch = int(mark[2])
        # The name of this directory's highest epoch stays; below<N> may go if e<N> records the same.
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
                why = "a broken block that was kept for inspection"
                yield Garbage(path, "set aside", why, _size(path), namespace.root)
        for path in sorted(directory.glob("*.kvb")) if namespace.problem else ():
            if _BLOCK_NAME.fullmatch(path.name):
                yield Garbage(path, UNKNOWN, _UNKNOWN_WHY, _size(path), namespace.root)


def _orphans(directory: Path, now: float, namespace: str) -> Iterator[Garbage]:
    for path in sorted(directory.glob(".*")):
        with contextlib.suppress(FileNotFoundError):
            if _is_orphan(path, now):
                why = f"its writer left it {(now - path.lstat().st_mtime) / 3600:.0f} h ago"
                yield Garbage(path, TEMPORARY, why, _size(path), namespace)


def _is_orphan(path: Path, now: float) -> bool:
    facts = path.lstat()
    is_directory = stat.S_ISDIR(facts.st_mode)
    if not (is_directory or stat.S_ISREG(facts.st_mode)) or not is_ours(path.name, directory=is_directory):
        return False
    return is_orphan(path.name, now - facts.st_mtime)


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
    """Returns whether a namespace's directory has no foreign files."""
    ours = {DESCRIPTION} | {path.name for _, path in _marks(root)}
    return all(name in ours or is_ours(name, directory=(root / name).is_dir()) for name in os.listdir(root))


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        return sum((Path(at) / name).lstat().st_size for at, _, names in os.walk(path) for name in names)
    return 0
