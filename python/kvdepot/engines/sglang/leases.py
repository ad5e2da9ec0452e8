"""Hits that are held in the pool from SGLang's question until it has read them. No clock and no lock of its own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

LEASE_S = 10.0
"""SGLang may shorten a hit, or forget it, and says so to nobody: what it has not read by then is let go."""


class Held(Protocol):
    """As much of a claim as is asked for."""

    def release(self) -> None:
        """Lets its blocks go."""


@dataclass
class Lease:
    """A claim, and what is still to be read of it.

    Attributes:
        claim: holds the blocks in the depot's pool.
        pools: names of pools whose last page has not been read.
        size: bytes that are held.
        ends_s: when it is let go at the latest.
    """

    claim: Held
    pools: set[str]
    size: int
    ends_s: float


class Leases:
    """Claims by the hash of their last page, oldest first; all together hold ``size_max`` bytes at most.

    Requests with the same prefix have a claim each, and a read ends one of them. What two hold counts twice.
    """

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self.size = 0
        self._held: dict[bytes, list[Lease]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def room(self) -> int:
        """How many bytes more may be held."""
        return max(0, self.size_max - self.size)

    def hold(self, claim: Held, last: bytes, pools: Iterable[str], size: int, now_s: float) -> None:
        """Holds a claim until ``last`` was read in all of ``pools``, beside what is held for that page already."""
        self._held.setdefault(last, []).append(Lease(claim, set(pools), size, now_s + LEASE_S))
        self.size += size

    def read(self, pool: str, hashes: Iterable[bytes]) -> None:
        """These pages of a pool were read, or could not be, by one request."""
        for last in hashes:
            lease = next((one for one in self._held.get(last, ()) if pool in one.pools), None)
            if lease is not None:
                lease.pools.discard(pool)
                if not lease.pools:
                    self._let_go(last, lease)

    def expire(self, now_s: float) -> int:
        """Lets go what was held too long; says how many claims."""
        return self._drop(lambda lease: lease.ends_s <= now_s)

    def clear(self) -> None:
        """Lets everything go."""
        self._drop(lambda _: True)

    def _drop(self, over: Callable[[Lease], bool]) -> int:
        ended = [(last, lease) for last, leases in self._held.items() for lease in leases if over(lease)]
        for last, lease in ended:
            self._let_go(last, lease)
        return len(ended)

    def _let_go(self, last: bytes, lease: Lease) -> None:
        left = [one for one in self._held[last] if one is not lease]
        if left:
            self._held[last] = left
        else:
            del self._held[last]
        self.size -= lease.size
        lease.claim.release()
