"""Steps that compute on KV that another connector loads, until it is known whether the loads succeeded."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvdepot.engines.vllm.rank_reports import UntilAllRanks


@dataclass
class _Witness:
    requests: set[str] | None = None
    later: set[str] = field(default_factory=set)


class Witnesses:
    """Steps whose number every rank reports back, so that the scheduler knows when their loads have ended.

    vLLM reports pages that could not be loaded together with that report.
    """

    def __init__(self, ranks: int) -> None:
        self._open: UntilAllRanks[_Witness] = UntilAllRanks(ranks)

    def begin(self, number: int, sharers: Iterable[str] = ()) -> None:
        """Adds a step that computes on another connector's load.

        ``sharers``: requests of the step that use pages which others of it load. If the load fails, vLLM makes only the
        loading request compute them again, so the sharers count as requests of later steps.
        """
        self._open.begin(number, _Witness(later=set(sharers)))

    def planned(self, request_ids: Iterable[str]) -> set[int]:
        """Notes a planned step with these requests. Returns the numbers of steps it may build on, itself included."""
        names = set(request_ids)
        for witness in self._open.all():
            if witness.requests is None:
                witness.requests = names
            else:
                witness.later |= names
        return set(self._open)

    def failed(self) -> tuple[set[int], set[str], set[str]]:
        """After a failed page: returns the possible numbers, the requests of their steps, and those of later steps."""
        found = self._open.all()
        own = {name for witness in found for name in witness.requests or ()}
        return set(self._open), own, {name for witness in found for name in witness.later}

    def reported(self, number: int, ranks: int) -> bool:
        """Counts ``ranks`` more ranks that have ended the step. Returns whether all have."""
        return self._open.reported(number, ranks) is not None
