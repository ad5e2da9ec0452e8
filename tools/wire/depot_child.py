"""Runs a depot for tools.wire.depot: takes calls from a socket, sends results or exceptions.

Run by the interpreter that has kvdepot, which differs from InfiniStore's.
"""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

import kvdepot
from tools.wire.calls import serve

LAYERS = 4
DRAIN_MS = 60_000

Pages = npt.NDArray[np.uint8]


def block_hash(number: int) -> bytes:
    """Returns the block's hash, as an engine would compute one."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def content(number: int, layer_bytes: int) -> Pages:
    """Returns a block's bytes; no two blocks have the same."""
    return np.random.default_rng(number).integers(0, 256, size=(LAYERS, layer_bytes), dtype=np.uint8)


class Depot:
    """A store of its own, with block numbers in place of buffers."""

    def __init__(self) -> None:
        self.store: Any = None
        self.layer_bytes = 0

    def open(self, config: dict[str, Any], layer_bytes: int) -> None:
        """Starts a depot in this process."""
        self.layer_bytes = layer_bytes
        layout = kvdepot.BlockLayout(shards=LAYERS, tensor_sizes_bytes=[layer_bytes])
        self.store = kvdepot.open(config, layout=layout, namespace={"model": "wire"})

    def dump(self, numbers: list[int]) -> bool:
        """Dumps blocks, and waits until the tiers were written, or have failed."""
        rows = [list(content(number, self.layer_bytes)) for number in numbers]
        self.store.dump([block_hash(number) for number in numbers], rows).wait().raise_for_failures()
        return bool(self.store.drain(DRAIN_MS))

    def load(self, numbers: list[int]) -> list[str]:
        """Loads blocks. Returns for each ``whole``, ``missing`` or ``wrong``."""
        pages = np.zeros((len(numbers), LAYERS, self.layer_bytes), dtype=np.uint8)
        result = self.store.load([block_hash(number) for number in numbers], [list(page) for page in pages]).wait()
        states = []
        for row, number in enumerate(numbers):
            if row in result.failed:
                states.append("missing")
            else:
                same = np.array_equal(pages[row], content(number, self.layer_bytes))
                states.append("whole" if same else "wrong")
        return states

    def lookup(self, numbers: list[int]) -> list[bool]:
        """Returns for each block whether it is present."""
        return [bool(there) for there in self.store.lookup([block_hash(number) for number in numbers])]

    def reset(self) -> None:
        """Drops all blocks."""
        self.store.reset()

    def stats(self) -> dict[str, Any]:
        """Returns the depot's own counters."""
        stats: dict[str, Any] = self.store.stats()["depot"]
        return stats


if __name__ == "__main__":
    serve(Depot())
