"""Which weights the engine computes with, as its scheduler knows it: a state machine without clock or I/O (P1).

A namespace's facts name the weights that were on disk. Weights in memory may be replaced while the engine runs, and
vLLM says so by ``reset_cache`` alone, which it also calls when they stay: before it sleeps, and at every pause. So
after a reset the workers digest what is in their memory, and all ranks' digests together are the version:

- the same as at the start: the namespaces of the start, with all that is stored in them
- others: a fact of their own, equal for engines that were given the same weights
- not known on some rank: a fact that nobody else has
"""

import hashlib
import secrets
from collections.abc import Callable, Mapping


class WeightsVersion:
    """The version of the weights, from a reset to the answer of all ranks.

    Attributes:
        generation: number of times that the version was put in doubt; workers answer by it.
        version: the fact, "" for the weights that the namespaces' facts name already, ``None`` while nobody knows.
        examining: whether the workers are asked.
    """

    def __init__(self, ranks: int, fresh: Callable[[], str] = lambda: secrets.token_hex(16)) -> None:
        self._ranks = ranks
        self._fresh = fresh
        self._at_start: dict[int, str] | None = None
        self._found: dict[int, str] = {}
        self._last = ""
        self.generation = 0
        self.version: str | None = ""
        self.examining = False

    def begin(self, digests: Mapping[int, str], named: bool) -> str:
        """The engine has started. ``named``: its facts tell its weights from others. Returns why that will not do."""
        if named:
            self._at_start, self._last = dict(digests), ""
        elif len(digests) == self._ranks and all(digests.values()):
            self._last = combined(digests)
        else:
            return (
                "neither the files of the model's weights are found nor can the weights in memory be digested, so "
                "nothing tells their KV from that of others: name them by weights_version in kv_connector_extra_config"
            )
        if not self.examining:  # else a reset came before the first step, and the answer is on its way
            self.version = self._last
        return ""

    def doubt(self, examine: bool) -> None:
        """The weights may be others from now on; the workers are asked, or nothing is known until a next doubt."""
        self.generation += 1
        self.version, self.examining, self._found = None, examine, {}

    def answered(self, generation: int, digests: Mapping[int, str]) -> bool:
        """Takes what ranks have found; true when the version is known by it."""
        if not self.examining or generation != self.generation:
            return False
        self._found.update(digests)
        if len(self._found) < self._ranks:
            return False
        self.examining = False
        if not all(self._found.values()):
            self.version = self._fresh()
        elif self._found == self._at_start:
            self.version = ""
        else:
            self.version = combined(self._found)
        return True

    def settled(self) -> bool:
        """Takes the version as the one in use; true when it is not the one that was in use before."""
        before, self._last = self._last, self.version or ""
        return before != self._last


def combined(digests: Mapping[int, str]) -> str:
    """All ranks' digests as one: what a rank computes depends on the weights of all."""
    text = "\n".join(f"{rank}:{digests[rank]}" for rank in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
