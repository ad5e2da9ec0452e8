"""``on_reset: drop``: drops what is stored for every engine; nothing is looked up until the depot has confirmed it."""

import time
from typing import TYPE_CHECKING

from kvdepot.engines.vllm.log import connector_logger
from kvdepot.errors import KVDepotError

if TYPE_CHECKING:
    from kvdepot import Depot, Namespace

logger = connector_logger()

RESET_RETRY_S = 0.5
"""Seconds until a depot that did not confirm a reset is asked again."""


class Drops:
    """Namespaces that the depot has yet to reset.

    Attributes:
        when_opened: whether to reset the namespaces opened next, because the reset came before they were known.
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
        """Queues these namespaces for a reset; an empty list keeps those that are already due."""
        self._due = namespaces or self._due

    def confirmed(self) -> bool:
        """Asks the depot for the reset. Returns true if none is due any more. Retries only after ``RESET_RETRY_S``."""
        now = time.monotonic()
        if self._tried_s and now - self._tried_s < RESET_RETRY_S:
            return False
        try:
            self._depot.reset(self._due)
        except KVDepotError as error:
            self._tried_s = time.monotonic()
            logger.error("kvdepot: the depot did not confirm the reset and is asked again: %s", error)  # noqa: TRY400
            return False
        self._due, self._tried_s = [], 0.0
        return True
