"""Finds the namespaces of directories, and the differences between two of them."""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdepot import _native

FORMAT_VERSION = 2
_ROOT = re.compile(r"[0-9a-f]{32}")
_EPOCH = re.compile(r"(?:e|below)(0|[1-9][0-9]{0,9})")
_NAMESPACE_JSON_BYTES_MAX = 256 << 10


@dataclass(frozen=True)
class StoredNamespace:
    """A namespace and the directories that hold it.

    Attributes:
        root: its name on disk, 32 hex digits.
        directories: the configured directories that have it.
        facts: its facts; empty if ``problem`` is set.
        layout: ``[[shard count, [tensor bytes, ...]], ...]``.
        epoch: the current one; blocks of earlier ones are unreachable.
        problem: why it cannot be read; empty if it can.
    """

    root: str
    directories: tuple[Path, ...]
    facts: Mapping[str, Any]
    layout: tuple[tuple[int, tuple[int, ...]], ...]
    epoch: int
    problem: str = ""

    @property
    def shard_bytes(self) -> tuple[int, ...]:
        """Bytes of each shard of a block."""
        return tuple(sum(tensors) for count, tensors in self.layout for _ in range(count))

    def key_id(self) -> str:
        """Returns the id in keys of the current epoch, 32 hex digits.

        Raises:
            KVDepotError: no depot accepts the facts or layout.
        """
        layout = [[count, list(tensors)] for count, tensors in self.layout]
        return _native.namespace_id(json.dumps(self.facts), json.dumps(layout), epoch=self.epoch)

    def block_directories(self) -> Iterator[Path]:
        """Yields the directories with the blocks of the current epoch."""
        for directory in self.directories:
            current = directory / self.root / f"e{self.epoch}"
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                yield current
                yield from (Path(one.path) for one in os.scandir(current) if one.is_dir(follow_symlinks=False))


def find_namespaces(directories: Iterable[Path]) -> list[StoredNamespace]:
    """Returns all namespaces in these directories, by name. Raises ``OSError`` if a directory cannot be read."""
    holders: dict[str, list[Path]] = {}
    for directory in directories:
        with os.scandir(directory) as entries:
            for entry in entries:
                if _ROOT.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    holders.setdefault(entry.name, []).append(directory)
    return [_read(root, tuple(holders[root])) for root in sorted(holders)]


def differences(one: StoredNamespace, other: StoredNamespace) -> list[tuple[str, object, object]]:
    """Returns facts that differ, as ``(dotted name, value of one, value of the other)``; ``None`` if one lacks it."""
    return fact_differences({**one.facts, "layout": one.layout}, {**other.facts, "layout": other.layout})


def fact_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, object, object]]:
    """Like ``differences``, for facts that need not be on a disk."""
    left, right = dict(_flat(one)), dict(_flat(other))
    names = [*left, *(name for name in right if name not in left)]
    return [(name, left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)]


def summary(facts: Mapping[str, Any]) -> str:
    """Formats the facts by which people distinguish models, as far as they exist, on one line."""
    flat = dict(_flat(facts))
    known = [name for name in ("kind", "model", "dtype", "cache_dtype", "kv_shard", "rank", "group") if name in flat]
    shown = known or list(flat)[:3]
    return " ".join(f"{name}={str(flat[name])[:40]}" for name in shown)


def _flat(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _read(root: str, directories: tuple[Path, ...]) -> StoredNamespace:
    epoch = max((_marked_epoch(directory / root) for directory in directories), default=0)
    problem = "there is no namespace.json"
    for directory in directories:
        try:
            with open(directory / root / "namespace.json", "rb") as file:
                text = file.read(_NAMESPACE_JSON_BYTES_MAX + 1)
            document = json.loads(text)
            version = document["format_version"]
            if version != FORMAT_VERSION:
                problem = f"its format has version {version}, and this kvdepot reads {FORMAT_VERSION}"
                continue
            facts = document["namespace"]["facts"]
            layout = tuple(
                (int(count), tuple(int(tensor) for tensor in tensors))
                for count, tensors in document["namespace"]["layout"]
            )
            epoch = max(epoch, int(document["epoch"]))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, KeyError) as error:
            problem = f"namespace.json cannot be read: {type(error).__name__}: {error}"
            continue
        if not isinstance(facts, dict):
            problem = "namespace.json has no facts"
            continue
        return StoredNamespace(root, directories, facts, layout, epoch)
    return StoredNamespace(root, directories, {}, (), epoch, problem)


def _marked_epoch(path: Path) -> int:
    with os.scandir(path) as entries:
        marks = [_EPOCH.fullmatch(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return max((int(mark[1]) for mark in marks if mark), default=0)
