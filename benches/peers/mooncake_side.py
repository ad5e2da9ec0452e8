"""Mooncake's client: batches of values, straight between registered memory and the holders."""

from collections.abc import Callable
from typing import Any

from mooncake.store import MooncakeDistributedStore

from benches.peers.side import Side, serve

LOCAL_BUFFER_BYTES = 16 << 20
BATCH = 128
"""Of larger batches single values fail; smaller ones are no faster."""
TRIES = 3
HOST = "127.0.0.1"


class MooncakeSide(Side):
    """A client; with ``segment_bytes`` also a holder of memory."""

    def open(self, settings: dict[str, Any]) -> None:
        """Connects to the master, and registers the pages."""
        self._store = MooncakeDistributedStore()
        segment = settings.get("segment_bytes", 0)
        code = self._store.setup(HOST, "P2PHANDSHAKE", segment, LOCAL_BUFFER_BYTES, "tcp", "", settings["master"])
        if code != 0:
            raise RuntimeError(f"setup of Mooncake's client: {code}")
        memory = self.blocks.memory
        code = self._store.register_buffer(memory.ctypes.data, memory.nbytes)
        if code != 0:
            raise RuntimeError(f"registration of {memory.nbytes} bytes: {code}")
        if self.blocks.shape.shards != 1:
            raise ValueError("a value has one shard")
        self._at = [int(one) for one in self.blocks.addresses().reshape(-1)]
        self._sizes = [self.blocks.shape.block_bytes] * self.blocks.shape.blocks

    def dump(self, hashes: list[bytes]) -> None:
        """Puts all pages in batches. What fails is put again: transfers fail on a busy machine."""
        left = list(range(len(hashes)))
        for _ in range(TRIES):
            left = self._moved(self._store.batch_put_from, hashes, left, lambda code, _: code < 0)
        if left:
            raise RuntimeError(f"{len(left)} of {len(hashes)} values were not put in {TRIES} tries")

    def persist(self) -> None:
        """Does nothing: a put returns when the holder has the value."""

    def load(self, hashes: list[bytes]) -> list[int]:
        """Gets all pages in batches."""
        return self._moved(
            self._store.batch_get_into, hashes, list(range(len(hashes))), lambda code, size: code != size
        )

    def load_one(self, name: bytes, page: int) -> bool:
        """Gets one page."""
        (size,) = self._store.batch_get_into([name.hex()], [self._at[page]], [self._sizes[page]])
        return bool(size == self._sizes[page])

    def _moved(
        self, call: Any, hashes: list[bytes], indexes: list[int], failed: Callable[[int, int], bool]
    ) -> list[int]:
        """Moves pages in batches. Returns those that failed."""
        left = []
        for start in range(0, len(indexes), BATCH):
            batch = indexes[start : start + BATCH]
            names = [hashes[index].hex() for index in batch]
            codes = call(names, [self._at[index] for index in batch], [self._sizes[index] for index in batch])
            left += [index for index, code in zip(batch, codes, strict=True) if failed(code, self._sizes[index])]
        return left


if __name__ == "__main__":
    serve(MooncakeSide())
