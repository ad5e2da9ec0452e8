"""Claims: the longest hit over several namespaces, brought into the pool and leased."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from typing_extensions import Self

from kvdepot import _native
from kvdepot.errors import ConfigError
from kvdepot.namespace import Namespace
from kvdepot.store import Store

# Tuples, because an engine's scheduler may poll a thousand claims in a step.


class Hit(NamedTuple):
    """How far a claim is.

    Attributes:
        settled: whether this is the final hit: its blocks are verified, in the pool and leased.
        units: leading hashes that are a hit, those that were skipped included; final once settled.
        units_from_tier: those of them that came from below the pool.
    """

    settled: bool
    units: int
    units_from_tier: int


class Arriving(NamedTuple):
    """A hit all of whose blocks are in the pool, or on their way to it.

    Attributes:
        units: leading hashes that will be a hit if all blocks arrive.
        units_now: leading hashes that are one if the claim is settled now.
        units_from_tier: those of ``units`` that come from below the pool.
        blocks_come: blocks that have come from the tiers.
        blocks_left: blocks that are still on their way.
    """

    units: int
    units_now: int
    units_from_tier: int
    blocks_come: int
    blocks_left: int


@dataclass(frozen=True)
class Group:
    """Blocks that a hit needs together: of a KV-cache group, or of a pool of pages.

    Attributes:
        stores: one store or namespace for each rank; the hit needs the blocks of all of them.
        window_blocks: number of last blocks of the hit that are needed, as for sliding windows; 0 = all blocks.
        hashes_per_block: hashes that one block covers, if other groups have smaller blocks.
    """

    stores: Sequence[Store | Namespace]
    window_blocks: int = 0
    hashes_per_block: int = 1


class TierReads(NamedTuple):
    """Blocks that came from a tier for a claim.

    Attributes:
        tier: name of the tier.
        blocks: number of blocks.
        first_ns, last_ns: when the first and the last of them were there, in nanoseconds before the release.
    """

    tier: str
    blocks: int
    first_ns: int
    last_ns: int


class ClaimTimes(NamedTuple):
    """When a claim got how far at the depot, in nanoseconds before its release. A claim that was made anew began then.

    Attributes:
        opened_ns: it was opened.
        admitted_ns: the depot knew the hit and had room for all of it; ``None`` = that did not happen.
        settled_ns: the hit was final; ``None`` = that did not happen.
        queued: whether it waited for room.
        tiers: what came for it from each tier.
    """

    opened_ns: int
    admitted_ns: int | None
    settled_ns: int | None
    queued: bool
    tiers: tuple[TierReads, ...]


class Claim:
    """A hit that is being prepared. Its blocks are fetched from the tiers into the pool, and stay there until released.

    A claim that is not polled for the depot's ``timeout_ms`` loses its leases; the next poll makes it anew. On a depot
    that is dead or hangs, a claim settles with no hit. Use it as a context manager, or release it.
    """

    __slots__ = ("__weakref__", "_native")

    def __init__(self, native: _native.Claim) -> None:
        self._native = native

    def poll(self) -> Hit:
        """Returns how far the claim is. Never waits, so it can be called in an engine's step.

        The depot is asked at most every half millisecond; once the claim has settled, a few times within the depot's
        ``timeout_ms``, to keep the leases.
        """
        return Hit._make(self._native.poll())

    def wait(self, timeout_ms: int) -> Hit:
        """Polls until the claim has settled, or until the time has passed."""
        return Hit._make(self._native.wait(timeout_ms))

    def arriving(self) -> Arriving | None:
        """Returns how much of an unsettled hit has arrived, as of the last poll.

        A load may begin while this is not ``None``: it waits for each block itself, and fails those that never arrive.

        Returns:
            ``None`` while a block of the hit is neither in the pool nor on its way to it.
        """
        found = self._native.arriving()
        return None if found is None else Arriving._make(found)

    @property
    def openings(self) -> int:
        """How often the claim was opened at a depot: more than once if a depot has let it go, or another took over."""
        return self._native.openings

    def settle(self) -> Hit:
        """Settles the claim with the blocks that have arrived so far, because the time for them is over."""
        return Hit._make(self._native.settle_now())

    def decline(self) -> Hit:
        """Settles the claim as ``settle`` does, because computing the rest is faster than waiting for it.

        ``kvdepot why`` and the metrics tell the two apart: ``too_slow`` and ``not_worth_it``.
        """
        return Hit._make(self._native.decline())

    def release(self, *, tell_times: bool = False) -> ClaimTimes | None:
        """Drops the leases. Idempotent. Loads that have begun keep leases of their own.

        Args:
            tell_times: whether to return when the claim got how far, for traces.

        Returns:
            The times, if they were asked for and a depot still held the claim; else ``None``.
        """
        told = self._native.release(tell_times=tell_times)
        if told is None:
            return None
        opened_ns, admitted_ns, settled_ns, queued, tiers = told
        return ClaimTimes(opened_ns, admitted_ns, settled_ns, queued, tuple(map(TierReads._make, tiers)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


NativeGroup = tuple[list[_native.Namespace], int, int]


def checked_groups(
    groups: Sequence[Group | Store | Namespace], hashes: int, skip: int, limit: int
) -> list[NativeGroup]:
    """Checks what a claim asks for, and returns its groups as the core takes them.

    Raises:
        ConfigError: a number is out of range, or a group has no stores.
        UnavailableError: a store is closed.
    """
    if not groups:
        raise ConfigError("groups: there must be a group")
    checked = []
    for one in groups:
        group = one if isinstance(one, Group) else Group([one])
        if not group.stores or not all(isinstance(store, Store | Namespace) for store in group.stores):
            raise ConfigError("groups: each group needs a store, and nothing but stores and namespaces")
        if group.window_blocks < 0 or group.hashes_per_block < 1:
            raise ConfigError(
                "groups: window_blocks must be 0 or more, and hashes_per_block 1 or more, got "
                f"{group.window_blocks} and {group.hashes_per_block}"
            )
        if skip % group.hashes_per_block:
            raise ConfigError(f"skip: must be a multiple of hashes_per_block, {group.hashes_per_block}, got {skip}")
        checked.append((native_namespaces(group.stores), group.window_blocks, group.hashes_per_block))
    if not 0 <= skip <= hashes:
        raise ConfigError(f"skip: must be between 0 and the number of hashes, {hashes}, got {skip}")
    if limit < 0:
        raise ConfigError(f"limit: must be 0 or more, got {limit}")
    return checked


def native_namespaces(stores: Sequence[Store | Namespace]) -> list[_native.Namespace]:
    """Returns the core's namespaces of stores and namespaces.

    Raises:
        UnavailableError: a store is closed.
    """
    return [store.native if isinstance(store, Namespace) else store.native_namespace for store in stores]
