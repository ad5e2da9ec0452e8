"""KV events for vLLM's publisher: which of this engine's blocks the depot has, no matter which engine stored them.

A follower reads the depot on a thread of its own (``Depot.follow``), so taking events never waits for the
depot, and an operational failure is at most an event that comes later.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvdepot.engines.vllm.log import connector_logger
from kvdepot.publish.terms import block_numbers, event_fields

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvdepot import Change, Depot, Follower, Group
    from kvdepot.engines.vllm.groups import Geometry

logger = connector_logger()

BLOCKS_PER_STEP = 2048
"""Maximum number of blocks that one step of the scheduler reports."""


def external_hashes(hashes: Sequence[bytes]) -> "list[bytes | int]":
    """Returns blocks' hashes in the form that vLLM's own events have.

    By default this is an integer of the last 8 bytes, with which the depot's 16 bytes end, too. With
    ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`` vLLM publishes all bytes, of which the depot has the last 16.
    """
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    # vLLM's function takes 2 us, and a step may report 2,048 blocks.
    if not isinstance(maybe_convert_block_hash(BlockHash(hashes[0])), int):
        return list(hashes)
    return list(block_numbers(hashes))


def wants_events(vllm_config: "VllmConfig") -> bool:
    """Returns whether the user has turned vLLM's KV events on."""
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and bool(config.enable_kv_cache_events)


class DepotEvents:
    """Turns the changes of a follower into vLLM's events. Called from the scheduler's thread."""

    def __init__(self, depot: "Depot", geometry: "Geometry") -> None:
        self._depot = depot
        self._group_indexes = [group.index for group in geometry.groups]
        self._follower: Follower | None = None
        self._followed: Sequence[Group] = ()
        self._over = False

    def take(self, groups: "Sequence[Group]") -> list[Any]:
        """Returns the events since the last call, of at most ``BLOCKS_PER_STEP`` blocks.

        Args:
            groups: the namespaces that the engine uses now; empty = none. When they change, the blocks of the earlier
                ones are reported as removed.
        """
        if self._over:
            return []
        try:
            self._follow(groups)
            if self._follower is None:
                return []
            return self._events(self._follower.take(BLOCKS_PER_STEP))
        except Exception as error:  # noqa: BLE001 - events are not worth an engine (P2)
            self._over = True
            # Not closed: that would wait for the depot. Without a reference it stops.
            self._follower = None
            logger.error("kvdepot: no more KV events, because they failed: %s", error)  # noqa: TRY400 - one line
            return []

    def _follow(self, groups: "Sequence[Group]") -> None:
        if groups is self._followed:
            return
        namespaces = [group.stores for group in groups]
        if self._follower is not None:
            self._follower.follow(namespaces)
        elif namespaces:
            self._follower = self._depot.follow(namespaces)
        self._followed = groups

    def _events(self, changes: "list[Change]") -> list[Any]:
        if not changes:
            return []
        from vllm.distributed.kv_events import BlockRemoved, BlockStored

        events: list[Any] = []
        for group, place, stored, hashes in changes:
            fields = event_fields(place, external_hashes(hashes), stored, self._group_indexes[group])
            kind = BlockStored if stored else BlockRemoved
            known = kind.__struct_fields__
            events.append(kind(**{field: value for field, value in fields.items() if field in known}))
        return events

    def close(self) -> None:
        """Stops following, for good."""
        self._over = True
        if self._follower is not None:
            self._follower.close()
            self._follower = None
