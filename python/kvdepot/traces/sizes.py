"""Cache sizes on the command line: blocks, or GiB if the size of a block is known."""

import re
from dataclasses import dataclass

from kvdepot.errors import config_error

MIB = 1 << 20
GIB = 1 << 30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb|gib)?", re.IGNORECASE)
WRITES = ("through", "second_use", "cold")


def blocks_of(text: str, block_bytes: float | None) -> int:
    """Returns the number of blocks: ``5000`` is that many, ``64GB`` is as many as fit into 64 GiB.

    Raises:
        ConfigError: it is neither, or the size of a block is required and unknown.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise config_error(f"{text!r} is not a size: write a number of blocks, or GiB such as 64GB")
    number, is_gb = float(found[1]), bool(found[2])
    if is_gb and block_bytes is None:
        raise config_error(f"{text!r} needs the size of a block: add --block-mib")
    blocks = int(number * GIB / block_bytes) if is_gb and block_bytes else int(number)
    if blocks < 1:
        raise config_error(f"{text!r} is too small for a block")
    return blocks


@dataclass(frozen=True)
class Tier:
    """A tier below the pool: its size, its eviction order, and which blocks it is given."""

    blocks: int
    policy: str
    write: str

    def level(self) -> dict[str, object]:
        """Returns the tier as the core's replay reads it."""
        return {"capacity": self.blocks, "policy": self.policy, "write": self.write}


def tier_of(text: str, block_bytes: float | None, policies: tuple[str, ...]) -> Tier:
    """Parses ``SIZE``, ``SIZE:WRITE`` or ``SIZE:WRITE:POLICY``.

    Raises:
        ConfigError: a part is wrong.
    """
    size, write, policy, *more = [*text.split(":"), "", ""][: max(3, text.count(":") + 1)]
    write, policy = write or "through", policy or "lru"
    if more or write not in WRITES or policy not in policies:
        raise config_error(
            f"{text!r} is not a tier: write SIZE:WRITE:POLICY with WRITE {', '.join(WRITES)} "
            f"and POLICY {', '.join(policies)}"
        )
    return Tier(blocks_of(size, block_bytes), policy, write)
