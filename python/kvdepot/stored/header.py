"""Reads block files: header, payload, checksums, padding. Checksums are compared before anything counts."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvdepot import _native
from kvdepot.errors import StorageError

MAGIC = b"KVDBLOCK"
VERSION = 2
PLAIN = 0
ENCODINGS = (1, 2)
PAGE = 4096
SHARDS_MAX = 4096
_FIXED = struct.Struct("<8sIIII16s16sQQQII32sQIIQ")


class BrokenBlockError(ValueError):
    """A file is not the complete block that its name and namespace promise; the text says why."""


@dataclass(frozen=True)
class BlockHeader:
    """A block file's header.

    Attributes:
        namespace_id: id of the namespace and epoch, 32 hex digits.
        hash: the block's hash, 32 hex digits.
        block_bytes: bytes of the block.
        stored_bytes: bytes of the payload.
        encoding: 0 = plain; otherwise how the payload is compressed.
        shard_checksums: CRC-64/NVME of each shard.
        created_unix_s: when it was written.
        writer: host and process id of the writer.
    """

    namespace_id: str
    hash: str
    block_bytes: int
    stored_bytes: int
    encoding: int
    shard_checksums: tuple[int, ...]
    created_unix_s: int
    writer: str

    @property
    def header_bytes(self) -> int:
        """Bytes before the payload."""
        return _whole_pages(_FIXED.size + 8 * len(self.shard_checksums))

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return _whole_pages(self.header_bytes + self.stored_bytes)


def parse_header(data: bytes) -> BlockHeader:
    """Returns the header at the beginning of ``data``.

    Raises:
        BrokenBlockError: it is not a complete header of a version that this kvdepot reads.
    """
    if len(data) < _FIXED.size:
        raise BrokenBlockError(f"the file ends in its header, after {len(data)} bytes")
    (
        magic,
        version,
        header_bytes,
        flags,
        shards,
        namespace_id,
        block_hash,
        block_bytes,
        slot_bytes,
        created,
        pid,
        reserved,
        host,
        stored_bytes,
        encoding,
        reserved_2,
        checksum,
    ) = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise BrokenBlockError("it is not a block file: the magic differs")
    if version != VERSION:
        raise BrokenBlockError(f"its format has version {version}, and this kvdepot reads {VERSION}")
    if not 1 <= shards <= SHARDS_MAX or header_bytes != _whole_pages(_FIXED.size + 8 * shards):
        raise BrokenBlockError(f"the header's lengths do not fit: {shards} shards, {header_bytes} bytes")
    if len(data) < header_bytes:
        raise BrokenBlockError(f"the file ends in its header, after {len(data)} bytes")
    header = data[:header_bytes]
    if _native.crc64nvme(header[: _FIXED.size - 8] + bytes(8) + header[_FIXED.size :]) != checksum:
        raise BrokenBlockError("the header's checksum is wrong")
    end = _FIXED.size + 8 * shards
    if flags or reserved or reserved_2 or any(header[end:]):
        raise BrokenBlockError("a field of the header that must be zero is not")
    _check_lengths(block_bytes, slot_bytes, stored_bytes, encoding)
    checksums = struct.unpack_from(f"<{shards}Q", header, _FIXED.size)
    name = host.rstrip(b"\0").decode("utf-8", "replace")
    return BlockHeader(
        namespace_id.hex(), block_hash.hex(), block_bytes, stored_bytes, encoding, checksums, created, f"{name} {pid}"
    )


def _check_lengths(block_bytes: int, slot_bytes: int, stored_bytes: int, encoding: int) -> None:
    if slot_bytes != _whole_pages(block_bytes) or not 1 <= stored_bytes <= 1 << 30:
        raise BrokenBlockError(f"the header's lengths do not fit: {block_bytes} block bytes, {stored_bytes} stored")
    if encoding == PLAIN and stored_bytes != block_bytes:
        raise BrokenBlockError(f"a plain block stores {stored_bytes} of {block_bytes} bytes")
    if encoding in ENCODINGS and _whole_pages(stored_bytes) >= slot_bytes:
        raise BrokenBlockError(f"a compressed block stores {stored_bytes} of {block_bytes} bytes, and saves no page")


def check_block(
    data: bytes, block_hash: str, namespace_id: str, shard_bytes: Sequence[int]
) -> tuple[BlockHeader, bytes | None]:
    """Checks a complete block file as a depot does when it reads one. Returns its header and the block.

    A block in an encoding that this kvdepot does not read is ``None``, and only its header was checked.

    Args:
        data: the file's bytes.
        block_hash: hash in its name, 32 hex digits.
        namespace_id: id in the current keys of its namespace, 32 hex digits.
        shard_bytes: bytes of each shard of the namespace's layout.

    Raises:
        BrokenBlockError: it is not that block, or is damaged.
    """
    header = parse_header(data)
    if header.hash != block_hash:
        raise BrokenBlockError(f"it is another block: {header.hash}")
    if header.namespace_id != namespace_id:
        raise BrokenBlockError(f"it belongs to another namespace or epoch: {header.namespace_id}")
    if header.encoding not in (PLAIN, *ENCODINGS):
        return header, None
    if len(shard_bytes) != len(header.shard_checksums) or sum(shard_bytes) != header.block_bytes:
        raise BrokenBlockError(f"its lengths are not the layout's: {header.block_bytes} bytes")
    if len(data) != header.file_bytes:
        raise BrokenBlockError(f"the file has {len(data)} bytes, and the block takes {header.file_bytes}")
    end = header.header_bytes + header.stored_bytes
    if any(data[end:]):
        raise BrokenBlockError("the padding is not zero")
    block = _decoded(header, data[header.header_bytes : end])
    at = 0
    view = memoryview(block)
    for shard, (size, checksum) in enumerate(zip(shard_bytes, header.shard_checksums, strict=True)):
        if _native.crc64nvme(bytes(view[at : at + size])) != checksum:
            raise BrokenBlockError(f"the checksum of shard {shard} is wrong")
        at += size
    return header, block


def _decoded(header: BlockHeader, payload: bytes) -> bytes:
    if header.encoding == PLAIN:
        return payload
    try:
        return _native.decode_block(header.encoding, payload, block_bytes=header.block_bytes)
    except StorageError as error:
        raise BrokenBlockError(f"its payload cannot be decompressed: {error}") from error


def _whole_pages(count: int) -> int:
    return -(-count // PAGE) * PAGE
