"""Hits that are held in the pool from SGLang's lookup until it has read them. No clock, no lock."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

LEASE_S = 10.0
"""Seconds after which a lease expires: SGLang may shorten or forget a hit without notice."""


class Held(Protocol):
    """The part of a claim that is used here and by ``room``."""

    def poll(self) -> tuple[bool, int, int]:
        """Returns whether it is settled, how many pages it has, and how many of them came from a tier."""

    def release(self) -> None:
        """Drops the leases of its blocks."""


@dataclass
class Lease:
    """A claim, and its pages that are still to be read.

    Attributes:
        claim: holds the blocks in the depot's pool.
        pools: names of pools whose last page has not been read.
        size: bytes that are held.
        units: number of pages that are held.
        ends_s: time at which it expires.
    """

    claim: Held
    pools: set[str]
    size: int
    units: int
    ends_s: float


class Leases:
    """Claims by key, oldest first. Together they hold at most ``size_max`` bytes; bytes that two hold count twice.

    The key is the hash of the claim's last page, or the name of a request. Requests with the same prefix have one claim
    each, and each read ends one of them.
    """

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self.size = 0
        self._held: dict[bytes, list[Lease]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def keys(self) -> set[bytes]:
        """Returns the keys of all claims."""
        return set(self._held)

    def room(self) -> int:
        """Returns how many more bytes may be held."""
        return max(0, self.size_max - self.size)

    def hold(self, claim: Held, key: bytes, pools: Iterable[str], size: int, now_s: float, *, units: int = 0) -> None:
        """Holds a claim until its last page was read in all of ``pools``, in addition to other claims with that key."""
        self._held.setdefault(key, []).append(Lease(claim, set(pools), size, units, now_s + LEASE_S))
        self.size += size

    def renew(self, key: bytes, now_s: float) -> Lease | None:
        """Returns the newest lease with a key, which now expires later; ``None`` if there is none."""
        lease = next(reversed(self._held.get(key, ())), None)
        if lease is not None:
            lease.ends_s = now_s + LEASE_S
        return lease

    def drop(self, key: bytes) -> None:
        """Releases all claims with a key."""
        for lease in tuple(self._held.get(key, ())):
            self._let_go(key, lease)

    def read(self, pool: str, hashes: Iterable[bytes]) -> None:
        """Notes that one request has read these pages of a pool, or failed to."""
        for last in hashes:
            lease = next((one for one in self._held.get(last, ()) if pool in one.pools), None)
            if lease is not None:
                lease.pools.discard(pool)
                if not lease.pools:
                    self._let_go(last, lease)

    def expire(self, now_s: float) -> int:
        """Releases expired claims. Returns their number."""
        return self._drop(lambda lease: lease.ends_s <= now_s)

    def clear(self) -> None:
        """Releases all claims."""
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
