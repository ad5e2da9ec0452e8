"""``on_reset: drop``: what is stored for everybody is forgotten, and nothing is looked up before the depot said so."""

import time
from typing import TYPE_CHECKING

from kvdepot.engines.vllm.log import connector_logger

if TYPE_CHECKING:
    from kvdepot._native import Depot, Namespace

logger = connector_logger()

RESET_RETRY_S = 0.5
"""How often a depot that did not confirm a reset is asked again."""


class Drops:
    """Namespaces that the depot has yet to reset.

    Attributes:
        when_opened: whether those are meant that are opened next, since the reset came before they were known.
    """

    def __init__(self, depot: "Depot") -> None:
        self._depot = depot
        self._due: list[Namespace] = []
        self._tried_s = 0.0
        self.when_opened = False

    @property
    def due(self) -> bool:
        """Whether a reset is not confirmed yet."""
        return bool(self._due)

    def ask(self, namespaces: list["Namespace"]) -> None:
        """These are to be reset; none = those that are due already."""
        self._due = namespaces or self._due

    def confirmed(self) -> bool:
        """Asks the depot; true when nothing is due any more. One that did not confirm is spared for a while."""
        from kvdepot._native import KVDepotError

        now = time.monotonic()
        if self._tried_s and now - self._tried_s < RESET_RETRY_S:
            return False
        try:
            self._depot.reset(self._due)
        except KVDepotError as error:
            self._tried_s = time.monotonic()
            logger.error("kvdepot: the depot did not confirm the reset, it is asked again: %s", error)  # noqa: TRY400
            return False
        self._due, self._tried_s = [], 0.0
        return True
