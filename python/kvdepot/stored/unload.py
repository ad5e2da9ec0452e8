"""Reads a namespace's block files into an export."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvdepot import _native
from kvdepot.errors import KVDepotError, StorageError
from kvdepot.stored.blocks import BlockFile, block_files
from kvdepot.stored.export import ExportedBlock, ExportHeader, ExportWriter
from kvdepot.stored.header import BrokenBlockError, check_block
from kvdepot.stored.namespaces import StoredNamespace, find_namespaces


@dataclass(frozen=True)
class Exported:
    """Outcome of an export.

    Attributes:
        blocks: blocks in the file.
        bytes: their bytes.
        broken: block files that were skipped, because they are damaged.
        gone: block files that were evicted in the meantime.
        unreadable: block files that were skipped, because of errors of the disk or missing permissions.
        trouble: the first of those errors; empty if there was none.
    """

    blocks: int
    bytes: int
    broken: int
    gone: int
    unreadable: int = 0
    trouble: str = ""


def export_namespace(namespace: StoredNamespace, path: Path, done: Callable[[int], object]) -> Exported:
    """Writes the blocks of the current epoch to a new file, least recently used first.

    Depots may use the directories concurrently. The file gets its name only when it is complete.

    Args:
        namespace: the namespace to export.
        path: path of the file; an existing file is replaced.
        done: called with the bytes of each block file.

    Raises:
        StorageError: the file cannot be written, or the namespace was reset in the meantime; then there is no new file.
        KVDepotError: no depot accepts the namespace's description.
    """
    key_id, shard_bytes = namespace.key_id(), namespace.shard_bytes
    files = sorted(block_files(namespace), key=lambda file: file.used_unix_s)
    blocks = total = broken = gone = unreadable = 0
    trouble = ""

    def is_current() -> bool:
        now = (one for one in find_namespaces(namespace.directories) if one.root == namespace.root)
        return any(one.epoch == namespace.epoch for one in now)

    with new_export(path, export_header(namespace), is_current) as export:
        for file in files:
            try:
                payload = _payload(file, key_id, shard_bytes)
            except FileNotFoundError:
                gone += 1
            except BrokenBlockError:
                broken += 1
            except OSError as error:
                unreadable += 1
                trouble = trouble or f"{file.path}: {error.strerror}"
            else:
                export.add(ExportedBlock(bytes.fromhex(file.hash), max(0, int(file.used_unix_s)), payload))
                blocks, total = blocks + 1, total + len(payload)
            done(file.bytes)
    return Exported(blocks, total, broken, gone, unreadable, trouble)


def export_header(namespace: StoredNamespace) -> ExportHeader:
    """Returns the description of an export of the namespace's current epoch, made now by this process."""
    writer = f"{socket.gethostname()} kvdepot {_native.__version__}"
    return ExportHeader(namespace.root, namespace.facts, namespace.layout, namespace.epoch, int(time.time()), writer)


@contextmanager
def new_export(path: Path, header: ExportHeader, is_current: Callable[[], bool]) -> Iterator[ExportWriter]:
    """Yields the writer of a new file, which gets its name at the end of the context.

    Args:
        path: path of the file; an existing file is replaced.
        header: description of the export.
        is_current: asked at the end whether the namespace is still in the header's epoch.

    Raises:
        StorageError: the file cannot be written, or the namespace was reset in the meantime; then there is no new file.
    """
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        # Private like the blocks: the prompts of a model must not be readable by others.
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(handle, "wb") as opened:
            export = ExportWriter(opened, header)
            yield export
            export.finish()
        if not is_current():
            raise StorageError(f"namespace {header.root} was reset while it was exported: export it again")
        os.replace(part, path)
    except OSError as error:
        if isinstance(error, KVDepotError):
            raise
        raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _payload(file: BlockFile, key_id: str, shard_bytes: tuple[int, ...]) -> bytes:
    handle = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as opened:
        data = opened.read()
    header, block = check_block(data, file.hash, key_id, shard_bytes)
    if block is None:
        raise BrokenBlockError(f"its encoding is {header.encoding}, which this kvdepot does not read")
    return block
