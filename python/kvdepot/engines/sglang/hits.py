"""Which lengths of a prefix can be restored, given the pages that each pool has. No clock, no depot."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

KV = "kv"
ALL_PAGES = "all_pages"
TRAILING_PAGES = "trailing_pages"


def leading(found: npt.NDArray[np.bool_]) -> int:
    """Returns how many leading pages are present."""
    gaps = np.flatnonzero(~found)
    return int(gaps[0]) if len(gaps) else len(found)


def restorable(found: npt.NDArray[np.bool_], pages: int, policy: str, window: int) -> npt.NDArray[np.bool_]:
    """Returns for every length from 0 to ``pages`` whether this pool has what a prefix of that length needs.

    Args:
        found: for each page, whether the pool has it.
        pages: length of the longest prefix.
        policy: ``all_pages``, or ``trailing_pages``: the last ``window`` ones, or all if the prefix has fewer.
        window: pages at the end of a prefix.
    """
    there = np.concatenate(([0], np.cumsum(found[:pages], dtype=np.int64)))
    lengths = np.arange(pages + 1)
    begins = np.zeros_like(lengths) if policy == ALL_PAGES else np.maximum(0, lengths - max(1, window))
    whole: npt.NDArray[np.bool_] = there[lengths] - there[begins] == lengths - begins
    return whole


def common(verdicts: Sequence[npt.NDArray[np.bool_]]) -> list[int]:
    """Returns lengths above 0 that every pool can restore, ascending."""
    together = np.logical_and.reduce(verdicts)
    return [int(length) for length in np.flatnonzero(together) if length]
