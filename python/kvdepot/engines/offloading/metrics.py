"""The tier's counters as metrics of vLLM, in addition to those that vLLM has for every tier."""

from collections.abc import Mapping
from typing import NamedTuple

ATTACHED = "vllm:kvdepot_offload_attached"
ATTACHED_TEXT = "Whether the secondary tier has a depot, 1 or 0."


class Count(NamedTuple):
    """A counter: its name in vLLM, its description, and whether it has the label ``kind``."""

    name: str
    text: str
    by_kind: bool = False


PLAIN = {
    "asked": Count("vllm:kvdepot_offload_asked_chunks", "Chunks that requests have looked for in the depot."),
    "hit": Count("vllm:kvdepot_offload_hit_chunks", "Chunks that the depot had when a request looked for them."),
    "lookups": Count("vllm:kvdepot_offload_lookups", "Lookups sent to the depot, each for many chunks."),
    "dumped": Count("vllm:kvdepot_offload_stored_chunks", "Chunks stored in the depot."),
    "loaded": Count("vllm:kvdepot_offload_loaded_chunks", "Chunks loaded from the depot."),
    "errors": Count("vllm:kvdepot_offload_errors", "Unexpected errors that concern no chunk; the tier continues."),
    "resets": Count("vllm:kvdepot_offload_resets", "Resets of vLLM's offloaded cache."),
}
KINDS = {
    "dump_": Count(
        "vllm:kvdepot_offload_store_failed_chunks", "Chunks that were not stored, by kind of failure.", True
    ),
    "load_": Count("vllm:kvdepot_offload_load_failed_chunks", "Chunks that were not loaded, by kind of failure.", True),
    "miss_": Count("vllm:kvdepot_offload_missed_chunks", "Chunks whose lookup was not completed, by reason.", True),
}
"""Counters by the prefix of their name; the rest of the name is the kind."""


def counter_of(name: str) -> tuple[Count, tuple[str, ...]] | None:
    """Returns the counter for a name, with its label values; ``None`` if it is not exported."""
    if name in PLAIN:
        return PLAIN[name], ()
    for beginning, count in KINDS.items():
        if name.startswith(beginning):
            return count, (name.removeprefix(beginning),)
    return None


class Changes:
    """Differences between successive counts."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def since(self, counts: Mapping[str, int]) -> list[tuple[str, tuple[str, ...], int]]:
        """Returns names of vLLM's counters, label values, and increments since the last call; ``counts`` are totals."""
        found = []
        for name, count in counts.items():
            grown = count - self._told.get(name, 0)
            counter = counter_of(name)
            if grown and counter is not None:
                found.append((counter[0].name, counter[1], grown))
        self._told = dict(counts)
        return found
