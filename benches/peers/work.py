"""The blocks that every side stores. Needs numpy alone: it also runs in the peers' environments, without kvdepot."""

import hashlib
from dataclasses import dataclass

import numpy as np

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
COMPARED_BYTES = 16 * MIB


@dataclass(frozen=True)
class Shape:
    """Blocks of equal shards."""

    shard_kib: int
    shards: int
    blocks: int

    @property
    def shard_bytes(self) -> int:
        """Bytes of one shard."""
        return self.shard_kib * KIB

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.shards * self.shard_bytes

    @property
    def bytes(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.block_bytes

    def __str__(self) -> str:
        """Returns text like ``32 x 256 KiB x 64``: shards of a block, size of a shard, blocks."""
        size = f"{self.shard_kib // KIB} MiB" if self.shard_kib % KIB == 0 else f"{self.shard_kib} KiB"
        return f"{self.shards} x {size} x {self.blocks}"


class Blocks:
    """An engine's memory: a page for each block, layers outermost. Every epoch has other blocks, with other bytes."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        size = (shape.shards, shape.blocks, shape.shard_bytes)
        self._base = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        self.memory = np.zeros_like(self._base)
        self._epoch_names = f"{seed}/{shape}"

    def fill(self, epoch: int) -> None:
        """Writes the bytes of an epoch into the memory."""
        np.add(self._base, np.uint8(epoch % 256), out=self.memory)

    def clear(self) -> None:
        """Overwrites the memory with bytes of no epoch that is in use."""
        np.add(self._base, np.uint8(255), out=self.memory)

    def wrong(self, epoch: int) -> list[int]:
        """Returns the blocks in the memory that differ from those of the epoch in any byte."""
        bad = np.zeros(self.shape.blocks, np.bool_)
        step = max(1, COMPARED_BYTES // self.shape.shard_bytes)
        for layer, base in zip(self.memory, self._base, strict=True):
            for start in range(0, self.shape.blocks, step):
                rows = slice(start, start + step)
                bad[rows] |= (layer[rows] != base[rows] + np.uint8(epoch % 256)).any(axis=1)
        return [int(index) for index in np.flatnonzero(bad)]

    def hashes(self, epoch: int, count: int | None = None) -> list[bytes]:
        """Returns the 16-byte names of an epoch's blocks."""
        prefix = f"{self._epoch_names}/{epoch}/"
        return [
            hashlib.sha256(f"{prefix}{index}".encode()).digest()[:16]
            for index in range(self.shape.blocks if count is None else count)
        ]

    def addresses(self) -> "np.ndarray[tuple[int, int], np.dtype[np.uint64]]":
        """Returns the address of each shard: one row per block, one column per shard."""
        layer, page, _ = self.memory.strides
        rows = np.arange(self.shape.blocks, dtype=np.uint64)[:, None] * np.uint64(page)
        columns = np.arange(self.shape.shards, dtype=np.uint64)[None, :] * np.uint64(layer)
        found = np.uint64(self.memory.ctypes.data) + rows + columns
        return np.ascontiguousarray(found, np.uint64)
