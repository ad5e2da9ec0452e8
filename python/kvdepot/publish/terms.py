"""The depot's blocks in the terms of vLLM's KV events, for both publishers: the connector and ``kvdepot events``."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

EVENT_HASH_BYTES = 8
"""Last bytes of a block's hash that name it in vLLM's KV events."""


class Medium(NamedTuple):
    """A place in the terms of vLLM's events."""

    medium: str
    locality: str


POOL = Medium("CPU", "LOCAL")
MEDIA = {
    "remote": Medium("CPU", "REMOTE"),
    "mooncake": Medium("CPU", "REMOTE"),
    "object": Medium("STORAGE", "REMOTE"),
}
"""Media of tiers; the others are local storage."""


def medium_of(place: str) -> Medium:
    """Returns the medium of the pool or a tier."""
    return POOL if place == "pool" else MEDIA.get(place.lower(), Medium("STORAGE", "LOCAL"))


def block_numbers(hashes: Iterable[bytes]) -> list[int]:
    """Returns blocks' hashes as vLLM publishes them by default: the last 8 bytes, as an unsigned integer."""
    return [int.from_bytes(one[-EVENT_HASH_BYTES:], "big") for one in hashes]


def event_fields(
    place: str, hashes: Sequence[bytes | int], is_stored: bool, group_idx: int | None = None
) -> dict[str, Any]:
    """Returns the fields of vLLM's ``BlockStored`` (``is_stored``) or ``BlockRemoved``.

    Args:
        place: ``pool``, or the name of a tier.
        hashes: the blocks' hashes in the form in which they are published.
        is_stored: whether the blocks can be read there from now on.
        group_idx: number of vLLM's KV cache group; ``None`` = unspecified.
    """
    medium = medium_of(place)
    fields: dict[str, Any] = {
        "block_hashes": hashes,
        "medium": medium.medium,
        "group_idx": group_idx,
        "locality": medium.locality,
        "ownership": f"kvdepot/{place}",
    }
    if is_stored:
        # The depot knows no tokens. vLLM's own offloading reports its blocks in the same form.
        fields |= {"parent_block_hash": None, "token_ids": [], "block_size": 0, "lora_id": None, "lora_name": None}
    return fields
