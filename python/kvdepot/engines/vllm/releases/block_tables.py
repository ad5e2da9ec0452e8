"""How the scheduler shows a connector the pages of a step's requests.

From 0.30 on it resolves a request's block table when it is asked for. 0.29 copies tables into each step, but only those
that the step has changed, so they have to be remembered.
"""

from collections.abc import Container
from typing import Protocol, cast


class CopiedTables(Protocol):
    """``KVConnectorBlockState`` of 0.29."""

    block_ids: dict[str, tuple[list[int], ...]]


class ResolvedTables(Protocol):
    """``KVConnectorBlockState`` from 0.30 on."""

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        """Returns a request's pages by group; ``None`` for a request that the step does not schedule."""


class BlockTables:
    """The block tables of the current step."""

    def __init__(self) -> None:
        self._resolved: ResolvedTables | None = None
        self._copied: dict[str, tuple[list[int], ...]] = {}

    def follow(self, tables: CopiedTables | ResolvedTables | None, alive: Container[str]) -> None:
        """Takes a step's tables. ``alive``: the requests of which tables may still be asked for."""
        self._resolved = None
        if hasattr(tables, "get_block_ids"):
            self._resolved = cast("ResolvedTables", tables)
        elif tables is not None:
            self._copied = {name: table for name, table in self._copied.items() if name in alive}
            self._copied.update(tables.block_ids)

    def pages_of(self, request_id: str) -> tuple[list[int], ...] | None:
        """Returns a request's pages by group, with the null block where a window has moved on; ``None`` = unknown."""
        if self._resolved is not None:
            return self._resolved.get_block_ids(request_id)
        return self._copied.get(request_id)
