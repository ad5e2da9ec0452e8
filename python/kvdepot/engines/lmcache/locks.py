"""What LMCache has locked with its lookups, and which claims that still needs. No clock, no thread, no depot.

LMCache unlocks each object once for each lookup that found it: after its load, or at once if it does not load it. It
does not say which lookup it means, so locks of one object are counted, not told apart.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

CLAIM_OBJECTS = 16
"""Objects of a claim, which holds all of them until the last one was loaded or unlocked."""
CLAIMS_MAX = 1024
LOCKS_MAX = 65_536
"""Locks that are counted, with and without a claim."""
DEBTS_MAX = LOCKS_MAX
"""Objects whose locks have ended before LMCache has unlocked them."""


class Held(Protocol):
    """The part of a claim that is used here."""

    def release(self) -> object:
        """Drops the leases of its blocks."""


@dataclass(eq=False)
class Grant:
    """Objects that one lookup has locked, with the claim that holds them.

    Attributes:
        claim: holds them in the depot's pool; ``None`` = nothing does, or not any more.
        size: bytes that it holds.
        locked: objects that were not unlocked.
        needed: those of them that were neither loaded nor deleted.
        ends_s: time at which all of that ends.
        doubtful: objects that may have been unlocked: an unlock has ended a debt, but could have been meant for them.
    """

    claim: Held | None
    size: int
    locked: set[bytes]
    needed: set[bytes]
    ends_s: float
    doubtful: set[bytes] = field(default_factory=set)


@dataclass
class Debt:
    """What is still to come for an object from those whose locks have expired, or were too many.

    Attributes:
        unlocks: unlocks.
        loads: loads before them.
    """

    unlocks: int = 0
    loads: int = 0


def plan(sizes: Sequence[tuple[Hashable, int]], room: int, claims: int) -> list[list[int]]:
    """Returns which objects to claim together: indexes of objects of one layout for each claim.

    Args:
        sizes: layout and bytes of each object, those first that are needed most.
        room: bytes that may be held.
        claims: number of claims that may be made.
    """
    fitting: dict[Hashable, list[int]] = {}
    for index, (layout, size) in enumerate(sizes):
        room -= size
        if room < 0:
            break
        fitting.setdefault(layout, []).append(index)
    cut = [
        indexes[begin : begin + CLAIM_OBJECTS]
        for indexes in fitting.values()
        for begin in range(0, len(indexes), CLAIM_OBJECTS)
    ]
    return sorted(cut)[: max(0, claims)]


class Locks:
    """Locks of objects. The methods return claims that nothing needs any more, which the caller releases."""

    def __init__(self, lease_s: float) -> None:
        """``lease_s``: seconds after which a lock ends, if LMCache neither loads nor unlocks."""
        self._lease_s = lease_s
        self._grants: deque[Grant] = deque()
        self._of: dict[bytes, list[Grant]] = {}
        self._debts: OrderedDict[bytes, Debt] = OrderedDict()
        self._locked = 0
        self.size = 0
        """Bytes that claims hold; those that two of them hold count twice."""
        self.claims = 0
        """Number of claims."""

    def __len__(self) -> int:
        return self._locked

    def lock(self, names: Iterable[bytes], claim: Held | None, size: int, now_s: float) -> list[Held]:
        """Locks objects that a lookup has found, which ``claim`` holds, of ``size`` bytes together."""
        wanted = set(names)
        if not wanted or self._locked + len(wanted) > LOCKS_MAX:
            for name in wanted:
                self._owe(name, load=True)
            return [] if claim is None else [claim]
        grant = Grant(claim, size, wanted, set(wanted), now_s + self._lease_s)
        for name in wanted:
            self._of.setdefault(name, []).append(grant)
        self._grants.append(grant)
        self._locked += len(wanted)
        if claim is not None:
            self.size += size
            self.claims += 1
        return []

    def unlock(self, names: Iterable[bytes]) -> list[Held]:
        """Ends one lock of each object: one that was loaded, else one without a claim, else the oldest."""
        over: list[Held] = []
        for name in names:
            grants = self._of.get(name, ())
            grant = min(grants, key=lambda one: (name in one.needed, one.claim is not None), default=None)
            debt = self._debts.get(name)
            if debt is not None and (
                grant is None or (debt.loads == debt.unlocks, False) < (name in grant.needed, grant.claim is not None)
            ):
                self._pay(debt, name)
            elif grant is not None:
                over += self._unlock(grant, name)
        self._sweep()
        return over

    def loaded(self, names: Iterable[bytes]) -> list[Held]:
        """Notes that one request has loaded these objects, or could not; it is still going to unlock them."""
        over: list[Held] = []
        for name in names:
            needing = [one for one in self._of.get(name, ()) if name in one.needed]
            # If another request has a claim, it may still need it.
            grant = min(needing, key=lambda one: one.claim is not None, default=None)
            debt = self._debts.get(name)
            if debt is not None and debt.loads and (grant is None or grant.claim is not None):
                debt.loads -= 1
            elif grant is not None:
                over += self._need_no_more(grant, name)
        return over

    def delete(self, names: Iterable[bytes]) -> list[Held]:
        """Notes that nobody will load these objects; those who locked them are still going to unlock them."""
        over: list[Held] = []
        for name in names:
            for grant in self._of.get(name, ()):
                over += self._need_no_more(grant, name)
            if name in self._debts:
                self._debts[name].loads = 0
        return over

    def lose(self) -> list[Held]:
        """Notes that no claim holds anything any more. The objects stay locked, without a lease."""
        over: list[Held] = []
        for grant in self._grants:
            over += self._drop_claim(grant)
        return over

    def expire(self, now_s: float) -> list[Held]:
        """Ends locks whose time is over. LMCache may still load and unlock the objects, which ends no other lease."""
        return self._end(lambda grant: grant.ends_s <= now_s)

    def clear(self) -> list[Held]:
        """Ends all locks."""
        over = self._end(lambda _: True)
        self._debts.clear()
        return over

    def _end(self, is_over: Callable[[Grant], bool]) -> list[Held]:
        """Ends the oldest locks, as long as these are over."""
        over: list[Held] = []
        while self._grants and is_over(self._grants[0]):
            grant = self._grants.popleft()
            for name in tuple(grant.locked):
                if name not in grant.doubtful:
                    self._owe(name, load=name in grant.needed)
                over += self._unlock(grant, name)
        return over

    def _owe(self, name: bytes, *, load: bool) -> None:
        """Notes that one more request is going to unlock an object that is not locked for it, and to ``load`` it."""
        debt = self._debts.setdefault(name, Debt())
        debt.unlocks += 1
        debt.loads += load
        self._debts.move_to_end(name)
        if len(self._debts) > DEBTS_MAX:
            self._debts.popitem(last=False)

    def _pay(self, debt: Debt, name: bytes) -> None:
        """Ends one lock that is owed.

        LMCache never unlocks what it has abandoned. Such a debt takes the unlock of a later request, whose lock then
        expires. That must not become a debt as well, or all later leases of the object would last until they expire.
        """
        debt.unlocks -= 1
        debt.loads = min(debt.loads, debt.unlocks)
        if not debt.unlocks:
            del self._debts[name]
        grant = next((one for one in self._of.get(name, ()) if name not in one.doubtful), None)
        if grant is not None:
            grant.doubtful.add(name)

    def _unlock(self, grant: Grant, name: bytes) -> list[Held]:
        grant.locked.discard(name)
        self._locked -= 1
        left = [one for one in self._of[name] if one is not grant]
        if left:
            self._of[name] = left
        else:
            del self._of[name]
        return self._need_no_more(grant, name)

    def _need_no_more(self, grant: Grant, name: bytes) -> list[Held]:
        grant.needed.discard(name)
        return [] if grant.needed else self._drop_claim(grant)

    def _drop_claim(self, grant: Grant) -> list[Held]:
        if grant.claim is None:
            return []
        claim, grant.claim = grant.claim, None
        self.size -= grant.size
        self.claims -= 1
        return [claim]

    def _sweep(self) -> None:
        """Forgets the oldest grants that are unlocked; younger ones wait for those, at most until they expire."""
        while self._grants and not self._grants[0].locked:
            self._grants.popleft()
