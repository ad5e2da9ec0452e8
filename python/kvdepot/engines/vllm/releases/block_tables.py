"""How the scheduler shows a connector the pages of a step's requests.

Up to 0.29 it copies every request's block table into each step; from 0.30 on it resolves a table when it is asked for.
"""

from typing import Protocol, cast


class CopiedTables(Protocol):
    """``KVConnectorBlockState`` of 0.29."""

    block_ids: dict[str, tuple[list[int], ...]]


class ResolvedTables(Protocol):
    """``KVConnectorBlockState`` from 0.30 on."""

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...] | None:
        """Returns a request's pages by group; ``None`` for a request that the step does not schedule."""


def pages_of(tables: CopiedTables | ResolvedTables, request_id: str) -> tuple[list[int], ...] | None:
    """Returns a request's pages by group; ``None`` for a request that the step does not schedule."""
    if hasattr(tables, "get_block_ids"):
        return cast("ResolvedTables", tables).get_block_ids(request_id)
    return tables.block_ids.get(request_id)
