"""A namespace's blocks as one file: written and read as a stream. ``docs/format.md`` describes every byte.

A reader trusts nothing before comparing its checksum. ``ExportReader.check`` compares all of them, and the one over the
file, before any block is stored.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from kvdepot import _native
from kvdepot.errors import CorruptError

MAGIC = b"KVDEXPRT"
VERSION = 1
HEADER_BYTES_MAX = 1 << 20
BLOCK_BYTES_MAX = 1 << 30
SHARDS_MAX = 4096
_START = struct.Struct("<8sII")
_RECORD = struct.Struct("<II16sQQQ")
_END = struct.Struct("<IIQQ")
_CHECKSUM = struct.Struct("<Q")
_KIND = struct.Struct("<II")
_BLOCK, _LAST = 1, 2
_PIECE_BYTES = 1 << 20

Layout = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class ExportHeader:
    """Description of an export.

    Attributes:
        root: the namespace's name on disk, 32 hex digits.
        facts: facts of the namespace.
        layout: ``((shard count, (tensor bytes, ...)), ...)``.
        epoch: the blocks' epoch.
        created_unix_s: when the export was made.
        writer: host and version of kvdepot, for people.
    """

    root: str
    facts: Mapping[str, Any]
    layout: Layout
    epoch: int
    created_unix_s: int
    writer: str

    @property
    def shard_bytes(self) -> tuple[int, ...]:
        """Bytes of each shard of a block."""
        return tuple(sum(tensors) for count, tensors in self.layout for _ in range(count))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return sum(count * sum(tensors) for count, tensors in self.layout)

    def layout_json(self) -> str:
        """Returns the layout as the core spells it."""
        return json.dumps([[count, list(tensors)] for count, tensors in self.layout])


@dataclass(frozen=True)
class ExportedBlock:
    """A block of an export: its hash (16 bytes), the time of its last use, and its bytes, one shard after another."""

    hash: bytes
    used_unix_s: int
    payload: bytes


@dataclass(frozen=True)
class Totals:
    """Number of an export's blocks, and their bytes."""

    blocks: int
    bytes: int


class ExportWriter:
    """Writes an export. The caller gives the file its name only after ``finish``.

    Args:
        file: opened for writing, empty.
        header: description of the export.
    """

    def __init__(self, file: BinaryIO, header: ExportHeader) -> None:
        self._file, self._header, self._sum = file, header, hashlib.sha256()
        self._blocks = self._bytes = 0
        text = json.dumps(
            {
                "root": header.root,
                "facts": header.facts,
                "layout": [[count, list(tensors)] for count, tensors in header.layout],
                "epoch": header.epoch,
                "created_unix_s": header.created_unix_s,
                "writer": header.writer,
            },
            sort_keys=True,
            ensure_ascii=False,
        ).encode()
        start = _START.pack(MAGIC, VERSION, len(text)) + text
        self._write(start + _CHECKSUM.pack(_native.crc64nvme(start)))

    def add(self, block: ExportedBlock) -> None:
        """Adds a block, which must have the layout's length."""
        if len(block.payload) != self._header.block_bytes or len(block.hash) != 16:
            raise ValueError(
                f"a block of {len(block.payload)} bytes does not have the header's {self._header.block_bytes} bytes"
            )
        record = _RECORD.pack(
            _BLOCK, 0, block.hash, block.used_unix_s, len(block.payload), _native.crc64nvme(block.payload)
        )
        self._write(record + _CHECKSUM.pack(_native.crc64nvme(record)))
        self._write(block.payload)
        self._blocks += 1
        self._bytes += len(block.payload)

    def finish(self) -> Totals:
        """Ends the file and syncs it."""
        self._write(_END.pack(_LAST, 0, self._blocks, self._bytes))
        self._file.write(self._sum.digest())
        self._file.flush()
        os.fsync(self._file.fileno())
        return Totals(self._blocks, self._bytes)

    def _write(self, data: bytes) -> None:
        self._sum.update(data)
        self._file.write(data)


class ExportReader:
    """Reads an export.

    Args:
        file: opened for reading, seekable.
        name: the file's name in errors.

    Raises:
        CorruptError: the file is not an export of a version that this kvdepot reads, or its header is damaged.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self.name = file, name
        file.seek(0, os.SEEK_END)
        self.file_bytes = file.tell()
        file.seek(0)
        start = self._exactly(_START.size, None)
        magic, version, length = _START.unpack(start)
        if magic != MAGIC:
            raise self._broken("it is no export of kvdepot: the magic differs")
        if version != VERSION:
            raise self._broken(f"its format has version {version}, and this kvdepot reads {VERSION}")
        if length > HEADER_BYTES_MAX:
            raise self._broken(f"its header says {length} bytes, and {HEADER_BYTES_MAX} are the most")
        text = self._exactly(length, None)
        self._head = start + text + self._exactly(_CHECKSUM.size, None)
        if _native.crc64nvme(start + text) != _CHECKSUM.unpack(self._head[-_CHECKSUM.size :])[0]:
            raise self._broken("the header's checksum is wrong")
        try:
            self.header = _header(json.loads(text))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise self._broken(f"its header cannot be read: {type(error).__name__}: {error}") from error
        if not 1 <= self.header.block_bytes <= BLOCK_BYTES_MAX:
            raise self._broken(f"its header says blocks of {self.header.block_bytes} bytes")

    def check(self, progress: Callable[[int], object]) -> Totals:
        """Reads the complete file and compares every checksum.

        Args:
            progress: called with the bytes of each block.

        Raises:
            CorruptError: something is wrong; the text says what and where.
        """
        blocks = total = 0
        for block in self.blocks():
            blocks += 1
            total += len(block.payload)
            progress(len(block.payload))
        return Totals(blocks, total)

    def blocks(self) -> Iterator[ExportedBlock]:
        """Yields the blocks in the order of the file. Raises ``CorruptError`` if a checksum or the end is wrong."""
        self._file.seek(len(self._head))
        summed, blocks, total = hashlib.sha256(self._head), 0, 0
        while True:
            kind, zero = _KIND.unpack(first := self._exactly(_KIND.size, None))
            if kind == _LAST and zero == 0:
                break
            if kind != _BLOCK or zero:
                raise self._broken(f"there is neither a block nor the end behind block {blocks}")
            rest = self._exactly(_RECORD.size - _KIND.size + _CHECKSUM.size, None)
            record, checksum = first + rest[: -_CHECKSUM.size], rest[-_CHECKSUM.size :]
            if _native.crc64nvme(record) != _CHECKSUM.unpack(checksum)[0]:
                raise self._broken(f"the checksum of the record of block {blocks} is wrong")
            _, _, name, used, length, payload_checksum = _RECORD.unpack(record)
            if length != self.header.block_bytes:
                raise self._broken(f"block {blocks} has {length} bytes, and its layout {self.header.block_bytes}")
            summed.update(record + checksum)
            payload = self._exactly(length, summed)
            if _native.crc64nvme(payload) != payload_checksum:
                raise self._broken(f"the checksum of block {blocks} ({name.hex()}) is wrong")
            yield ExportedBlock(name, used, payload)
            blocks += 1
            total += length
        end = first + self._exactly(_END.size - _KIND.size, None)
        summed.update(end)
        _, _, said_blocks, said_bytes = _END.unpack(end)
        if self._exactly(summed.digest_size, None) != summed.digest():
            raise self._broken("the checksum over the whole file is wrong")
        if (said_blocks, said_bytes) != (blocks, total):
            raise self._broken(f"it says {said_blocks} blocks, and has {blocks}")
        if self._file.read(1):
            raise self._broken("there are bytes behind its end")

    def _exactly(self, count: int, summed: "hashlib._Hash | None") -> bytes:
        parts: list[bytes] = []
        left = count
        while left:
            part = self._file.read(min(left, _PIECE_BYTES) if summed is not None else left)
            if not part:
                raise self._broken(f"it ends after {self._file.tell()} bytes, before its end: it was cut off")
            if summed is not None:
                summed.update(part)
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _broken(self, why: str) -> CorruptError:
        return CorruptError(f"{self.name}: {why}. Nothing of it can be trusted: export again")


def _header(document: Mapping[str, Any]) -> ExportHeader:
    layout: Sequence[Any] = document["layout"]
    facts = document["facts"]
    if not isinstance(facts, dict):
        raise TypeError("facts is no object")
    spelled = tuple((int(count), tuple(int(tensor) for tensor in tensors)) for count, tensors in layout)
    shards = sum(count for count, _ in spelled)
    if any(count < 1 or min(tensors, default=0) < 1 for count, tensors in spelled) or shards > SHARDS_MAX:
        raise ValueError(f"a layout of {shards} shards: 1 to {SHARDS_MAX} have one tensor or more, of a byte or more")
    return ExportHeader(
        root=str(document["root"]),
        facts=facts,
        layout=spelled,
        epoch=int(document["epoch"]),
        created_unix_s=int(document["created_unix_s"]),
        writer=str(document["writer"]),
    )
