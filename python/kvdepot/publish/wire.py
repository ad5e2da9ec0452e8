"""vLLM's wire format of KV events: a msgpack array of time, events and rank, each event a map with its class's name."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvdepot.publish.contents import Change
from kvdepot.publish.terms import block_numbers, event_fields

HashForm = Literal["int", "bytes"]
Hash = int | bytes


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks that can be read in a place from now on, with the fields of vLLM's class that the depot knows."""

    block_hashes: list[Hash]
    parent_block_hash: None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """Blocks that can no longer be read in a place."""

    block_hashes: list[Hash]
    medium: str
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block of this publisher is known any more."""


class KVEventBatch(msgspec.Struct, array_like=True):
    """A batch, as vLLM's class of this name is encoded."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


class BatchEncoder:
    """Encodes batches of changes."""

    def __init__(self, hash_form: HashForm = "int", data_parallel_rank: int = 0, *, tells_group: bool = False) -> None:
        """Fixes what every batch has in common.

        Args:
            hash_form: ``int`` = the last 8 bytes of each hash as a number, vLLM's default; ``bytes`` = all 16 bytes.
            data_parallel_rank: number that every batch carries.
            tells_group: whether events say the number of the group of namespaces, as vLLM does for hybrid models.
        """
        self._as_numbers = hash_form == "int"
        self._rank = data_parallel_rank
        self._tells_group = tells_group
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, changes: Sequence[Change], clears: bool, now_s: float) -> bytes:
        """Returns a batch; if ``clears``, its first event says that all blocks are gone."""
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = [AllBlocksCleared()] if clears else []
        for change in changes:
            hashes = block_numbers(change.hashes) if self._as_numbers else list(change.hashes)
            group = change.group if self._tells_group else None
            kind = BlockStored if change.is_stored else BlockRemoved
            events.append(kind(**event_fields(change.place, hashes, change.is_stored, group)))
        return self._encoder.encode(KVEventBatch(now_s, events, self._rank))
