"""What a publisher has reported: which blocks are in which place, over the ranks of an engine. Pure."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvdepot.events import BlockEvent


class Change(NamedTuple):
    """Blocks that became readable in a place for all ranks, or stopped being so.

    Attributes:
        group: number of the group of namespaces.
        place: ``pool``, or the name of a tier.
        is_stored: whether the blocks can be read there from now on.
        hashes: the blocks' hashes, 16 bytes each.
    """

    group: int
    place: str
    is_stored: bool
    hashes: tuple[bytes, ...]


class Contents:
    """Joins the events of namespaces.

    With groups, a block counts while all namespaces of its group have it, as for a hit of an engine with several ranks.
    Without groups, a block counts while any namespace has it.
    """

    def __init__(self, groups: Sequence[Sequence[str]] = ()) -> None:
        """Begins with no block.

        Args:
            groups: names of the namespaces of each group, or first digits of them; empty = one group of all namespaces.
        """
        self._wanted = [(number, prefix) for number, group in enumerate(groups) for prefix in group]
        self._thresholds = [len(group) for group in groups] or [1]
        self._group_of: dict[str, int | None] = {}
        self._taken: dict[tuple[int, str], str] = {}
        self._holders: list[dict[str, dict[bytes, int]]] = [{} for _ in self._thresholds]
        self.ambiguous: list[tuple[str, str, str]] = []
        """Digits that name two namespaces: the digits, the namespace that is published, and the one that is not."""

    @property
    def is_mixed(self) -> bool:
        """Whether blocks of several namespaces are published as those of one, because no groups were named."""
        return not self._wanted and len(self._group_of) > 1

    @property
    def published(self) -> list[str]:
        """The namespaces seen so far that count."""
        return [name for name, group in self._group_of.items() if group is not None]

    def blocks(self) -> dict[str, int]:
        """Returns the number of blocks that all ranks have in each place."""
        counts: dict[str, int] = {}
        for threshold, places in zip(self._thresholds, self._holders, strict=True):
            for place, holders in places.items():
                counts[place] = counts.get(place, 0) + sum(count >= threshold for count in holders.values())
        return counts

    def apply(self, event: BlockEvent) -> Change | None:
        """Returns what an event changes for an engine; ``None`` = nothing."""
        group = self._group(event.namespace)
        if group is None:
            return None
        threshold = self._thresholds[group]
        holders = self._holders[group].setdefault(event.place, {})
        changed = []
        for one in event.hashes:
            before = holders.get(one, 0)
            if event.stored:
                holders[one] = before + 1
                if before + 1 == threshold:
                    changed.append(one)
            elif before:
                if before == 1:
                    del holders[one]
                else:
                    holders[one] = before - 1
                if before == threshold:
                    changed.append(one)
        return Change(group, event.place, event.stored, tuple(changed)) if changed else None

    def present(self) -> Iterator[Change]:
        """Yields what is there now, as one change for each group and place."""
        for group, (threshold, places) in enumerate(zip(self._thresholds, self._holders, strict=True)):
            for place, holders in places.items():
                if found := tuple(one for one, count in holders.items() if count >= threshold):
                    yield Change(group, place, True, found)

    def still(self, change: Change) -> Change:
        """Returns a change that ``present`` has yielded, without the blocks that have gone since."""
        holders = self._holders[change.group].get(change.place, {})
        threshold = self._thresholds[change.group]
        return change._replace(hashes=tuple(one for one in change.hashes if holders.get(one, 0) >= threshold))

    def _group(self, namespace: str) -> int | None:
        if namespace not in self._group_of:
            self._group_of[namespace] = self._choose(namespace)
        return self._group_of[namespace]

    def _choose(self, namespace: str) -> int | None:
        if not self._wanted:
            return 0
        for group, prefix in self._wanted:
            if not namespace.startswith(prefix):
                continue
            # The group would otherwise count two namespaces as one rank.
            taken = self._taken.setdefault((group, prefix), namespace)
            if taken == namespace:
                return group
            self.ambiguous.append((prefix, taken, namespace))
        return None
