"""Finds a namespace's block files."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdepot.stored.namespaces import StoredNamespace

_BLOCK = re.compile(r"([0-9a-f]{32})\.kvb")
_ASIDE = re.compile(r"[0-9a-f]{32}\.bad")


@dataclass(frozen=True)
class BlockFile:
    """A block file as listed in its directory.

    Attributes:
        path: path of the file.
        hash: the block's hash, 32 hex digits.
        bytes: the file's length.
        used_unix_s: time of the block's last use, accurate to a minute.
    """

    path: Path
    hash: str
    bytes: int
    used_unix_s: float


@dataclass(frozen=True)
class Contents:
    """Content of a namespace.

    Attributes:
        blocks: files of its current epoch.
        bytes: their length.
        first_used_unix_s: last use of the least recently used block; ``None`` without blocks.
        last_used_unix_s: last use of the most recently used block; ``None`` without blocks.
        aside: corrupt files that were kept for inspection.
    """

    blocks: int
    bytes: int
    first_used_unix_s: float | None
    last_used_unix_s: float | None
    aside: int


def block_files(namespace: StoredNamespace) -> Iterator[BlockFile]:
    """Yields the block files of the current epoch, except those that vanish in the meantime."""
    for entry in _entries(namespace):
        match = _BLOCK.fullmatch(entry.name)
        if match is None:
            continue
        try:
            facts = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield BlockFile(Path(entry.path), match[1], facts.st_size, facts.st_mtime)


def contents(namespace: StoredNamespace, told: Callable[[int], object] = lambda _: None) -> Contents:
    """Counts a namespace's files; reads the metadata of each. ``told`` is called with numbers of counted files."""
    blocks = total = 0
    first: float | None = None
    last: float | None = None
    for file in block_files(namespace):
        told(1)
        blocks += 1
        total += file.bytes
        first = file.used_unix_s if first is None else min(first, file.used_unix_s)
        last = file.used_unix_s if last is None else max(last, file.used_unix_s)
    aside = sum(1 for entry in _entries(namespace) if _ASIDE.fullmatch(entry.name))
    return Contents(blocks, total, first, last, aside)


def _entries(namespace: StoredNamespace) -> Iterator["os.DirEntry[str]"]:
    for directory in namespace.block_directories():
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
            yield from entries
