"""Version of the weights that the engine computes with, as its scheduler sees it: no clock, no I/O (P1).

A namespace's facts name the weights that were on disk. Weights in memory may be replaced while the engine runs, and
vLLM signals that only by ``reset_cache``, which it also calls when they stay: before it sleeps, and at every pause. So
after a reset the workers digest the weights in their memory, and all ranks' digests together are the version:

- the same as at the start: the namespaces of the start, with everything stored in them
- others: a fact of their own, equal for engines that were given the same weights
- unknown on some rank: a fact that no other engine has
"""

import hashlib
import secrets
from collections.abc import Callable, Mapping


class WeightsVersion:
    """State machine of the version of the weights, from a reset to the answer of all ranks.

    Attributes:
        generation: number of times that the version was put in doubt; workers refer to it in their answers.
        version: the fact, "" for the weights that the namespaces' facts name already, ``None`` while unknown.
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
        """Starts the engine. ``named``: its facts distinguish its weights from others. Returns a problem, or ""."""
        if named:
            self._at_start, self._last = dict(digests), ""
        elif len(digests) == self._ranks and all(digests.values()):
            self._last = combined(digests)
        else:
            return (
                "neither the files of the model's weights are found nor can the weights in memory be digested, so "
                "nothing tells their KV from that of others: name them by weights_version in kv_connector_extra_config"
            )
        if not self.examining:  # else a reset came before the first step, and the answer is in flight
            self.version = self._last
        return ""

    def doubt(self, examine: bool) -> None:
        """Puts the weights in doubt: the workers are asked, or the version stays unknown until the next doubt."""
        self.generation += 1
        self.version, self.examining, self._found = None, examine, {}

    def answered(self, generation: int, digests: Mapping[int, str]) -> bool:
        """Takes the digests of some ranks. Returns true once they determine the version."""
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
        """Makes the version the one in use. Returns whether it differs from the one before."""
        before, self._last = self._last, self.version or ""
        return before != self._last


def combined(digests: Mapping[int, str]) -> str:
    """Combines all ranks' digests into one: what a rank computes depends on the weights of all."""
    text = "\n".join(f"{rank}:{digests[rank]}" for rank in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
