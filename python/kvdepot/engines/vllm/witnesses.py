"""Steps that compute on KV that another connector loads, until it is known whether it was good."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvdepot.engines.vllm.rank_reports import UntilAllRanks


@dataclass
class _Witness:
    requests: set[str] | None = None
    later: set[str] = field(default_factory=set)


class Witnesses:
    """Steps whose number every rank reports back, so that the scheduler knows when their loads have ended.

    vLLM tells pages that could not be loaded together with that report.
    """

    def __init__(self, ranks: int) -> None:
        self._open: UntilAllRanks[_Witness] = UntilAllRanks(ranks)

    def begin(self, number: int) -> None:
        """A step computes on another connector's load."""
        self._open.begin(number, _Witness())

    def planned(self, request_ids: Iterable[str]) -> set[int]:
        """A step with these requests: the numbers of steps that it may build on, itself included."""
        names = set(request_ids)
        for witness in self._open.all():
            if witness.requests is None:
                witness.requests = names
            else:
                witness.later |= names
        return set(self._open)

    def failed(self) -> tuple[set[int], set[str], set[str]]:
        """A page could not be loaded: numbers that may be meant, the requests of their steps, those of later ones."""
        found = self._open.all()
        own = {name for witness in found for name in witness.requests or ()}
        return set(self._open), own, {name for witness in found for name in witness.later}

    def reported(self, number: int, ranks: int) -> bool:
        """So many ranks have ended the step; whether all have now."""
        return self._open.reported(number, ranks) is not None
