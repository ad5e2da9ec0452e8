"""Priorities of stored blocks."""

from typing import Literal, get_args

Priority = Literal["low", "normal", "high"]
"""How long a block stays in the pool, compared with others; see ``Store.dump``."""

PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""All priorities, the lowest first."""
