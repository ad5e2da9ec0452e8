"""Cache sizes on the command line: blocks, or GiB if the size of a block is known."""

import re
from dataclasses import dataclass

from kvdepot.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb|gib)?", re.IGNORECASE)
WRITES = ("through", "second_use", "cold", "demoted")


def blocks_of(text: str, block_bytes: float | None) -> int:
    """Returns the number of blocks: ``5000`` is that many, ``64GB`` is as many as fit into 64 GiB.

    Raises:
        ConfigError: it is neither, or the size of a block is required and unknown.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is not a size: write a number of blocks, or GiB such as 64GB")
    number, is_gb = float(found[1]), bool(found[2])
    if is_gb and block_bytes is None:
        raise ConfigError(f"{text!r} needs the size of a block: add --block-mib")
    blocks = int(number * GIB / block_bytes) if is_gb and block_bytes else int(number)
    if blocks < 1:
        raise ConfigError(f"{text!r} is too small for a block")
    return blocks


@dataclass(frozen=True)
class Tier:
    """A tier below the pool: its size, its eviction order, and which blocks it is given."""

    blocks: int
    policy: str
    write: str
    promote: bool = False
    writes_per_day: int = 0
    """Blocks that it is given a day at most; 0 = no limit."""

    def level(self) -> dict[str, object]:
        """Returns the tier as the core's replay reads it."""
        return {
            "capacity": self.blocks,
            "policy": self.policy,
            "write": self.write,
            "promote": self.promote,
            "writes_per_day": self.writes_per_day,
        }


def tier_of(text: str, block_bytes: float | None, policies: tuple[str, ...]) -> Tier:
    """Parses ``SIZE:WRITE:POLICY:BUDGET``; all parts but the first may be empty or left out.

    Raises:
        ConfigError: a part is wrong.
    """
    size, write, policy, budget, *more = [*text.split(":"), "", "", ""][: max(4, text.count(":") + 1)]
    write, promotes, other = write.partition("+promote")
    write, policy = write or "through", policy or "lru"
    if more or other or write not in WRITES or policy not in policies:
        raise ConfigError(
            f"{text!r} is not a tier: write SIZE:WRITE:POLICY:BUDGET with WRITE {', '.join(WRITES)}, each also with "
            f"+promote, and POLICY {', '.join(policies)}"
        )
    writes_per_day = blocks_of(budget, block_bytes) if budget else 0
    return Tier(blocks_of(size, block_bytes), policy, write, bool(promotes), writes_per_day)
