"""How a block is cut into shards and tensors."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from kvdepot.errors import ConfigError

SHARDS_MAX = 4096
TENSORS_MAX = 65_536
BLOCK_BYTES_MAX = 1 << 30


@dataclass(frozen=True)
class BlockLayout:
    """Layout of a block: equal shards, each made of tensors.

    Attributes:
        shards: parts of a block that move as one: 1, or the number of layers when layers move one by one. At most
            4096.
        tensor_sizes_bytes: sizes of the tensors of one shard, in order. A block has at most 65,536 tensors.

    Raises:
        ConfigError: no shard or tensor, too many, an empty tensor, or a block of more than 1 GiB.
    """

    shards: int
    tensor_sizes_bytes: tuple[int, ...]

    def __init__(self, shards: int, tensor_sizes_bytes: Iterable[int]) -> None:
        object.__setattr__(self, "shards", int(shards))
        object.__setattr__(self, "tensor_sizes_bytes", tuple(map(int, tensor_sizes_bytes)))
        sizes = self.tensor_sizes_bytes
        if not 1 <= self.shards <= SHARDS_MAX:
            raise ConfigError(f"layout: a block has 1 to {SHARDS_MAX} shards, got {self.shards}")
        if not sizes or len(sizes) * self.shards > TENSORS_MAX:
            raise ConfigError(f"layout: a block has 1 to {TENSORS_MAX} tensors, got {len(sizes) * self.shards}")
        if min(sizes) < 1:
            raise ConfigError(f"layout: every tensor has at least one byte, got tensor_sizes_bytes={sizes}")
        if self.block_bytes > BLOCK_BYTES_MAX:
            raise ConfigError(f"layout: a block has at most {BLOCK_BYTES_MAX} bytes, got {self.block_bytes}")

    @property
    def shard_bytes(self) -> int:
        """Bytes of one shard."""
        return sum(self.tensor_sizes_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all shards together."""
        return self.shards * self.shard_bytes

    def to_json(self) -> str:
        """Returns the layout as the core and a namespace's description spell it: ``[[shards,[sizes…]]]``."""
        return json.dumps([[self.shards, list(self.tensor_sizes_bytes)]], separators=(",", ":"))

    @staticmethod
    def of(layout: "BlockLayout | Iterable[int]") -> "BlockLayout":
        """Returns ``layout`` itself, or a block of one shard made from tensor sizes in bytes."""
        return layout if isinstance(layout, BlockLayout) else BlockLayout(1, layout)
