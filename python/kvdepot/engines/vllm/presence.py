"""The lines in vLLM's log about the depot, each written once: its place, attached, lost, back, and why not."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvdepot.absence import absence
from kvdepot.config.machine import Machine
from kvdepot.config.sizes import GIB
from kvdepot.engines.vllm.log import connector_logger

if TYPE_CHECKING:
    from kvdepot.config import KVDepotConfig

logger = connector_logger()

TAKEN = ("pool_gb", "pool_slots", "directories", "posix_capacity_gb")
"""Keys of machine resources that a depot takes."""


class Attached(Protocol):
    """The part of ``kvdepot.Depot`` that is used here."""

    @property
    def attached(self) -> bool:
        """Whether calls currently reach a depot."""

    @property
    def trouble(self) -> str:
        """Why none is attached."""

    def stats(self) -> dict[str, Any]:
        """Returns the depot's own statistics."""


@dataclass(frozen=True)
class Place:
    """Where the depot is expected.

    Attributes:
        starts: whether this engine starts it.
        patience_s: seconds that a depot started elsewhere may take before its absence is an error.
    """

    socket: str
    pipeline: str
    starts: bool = True
    patience_s: float = 0.0

    @staticmethod
    def of(config: "KVDepotConfig", socket: str) -> "Place":
        """Returns the place of a configuration's depot."""
        return Place(socket, config.pipeline, config.start_depot, config.attach_timeout_ms / 1e3)


class Presence:
    """Follows one engine's attachment. Only its scheduler has one, so that ranks do not repeat each other."""

    def __init__(self, depot: Attached, place: Place, clock: Callable[[], float] = time.monotonic) -> None:
        self._depot = depot
        self._place = place
        self._clock = clock
        self._since_s = clock()
        self._attached = self._seen = self._complained = False
        self._told: bool | None = None

    def begin(self, taken: Iterable[str] = ()) -> None:
        """Logs at the engine's start the depot's place, resources ``taken`` by default, and whether it is there."""
        starts = "" if self._place.starts else " (start_depot: false, so this engine does not start it)"
        logger.info("kvdepot: pipeline %s, depot at %s%s", self._place.pipeline, self._place.socket, starts)
        for text in taken:
            logger.info("kvdepot: %s", text)
        self._look(self._facts)
        if not self._attached and not self._complained:
            logger.info("kvdepot: no depot answers yet: the engine computes everything until one does")

    def look(self) -> None:
        """Logs changes since the last call; called between steps. Does not query the depot, which may be slow."""
        self._look(str)

    def _look(self, facts: Callable[[], str]) -> None:
        attached = self._depot.attached
        if attached != self._attached:
            self._attached = attached
            self._say_change(facts)
        elif not attached and not self._seen and not self._complained:
            waited_s = self._clock() - self._since_s
            if self._place.starts or waited_s >= self._place.patience_s:
                self._complained = True
                self._complain(waited_s)

    def changed(self) -> bool | None:
        """Returns whether a depot is attached, if that differs from the last answer; else ``None``."""
        told, self._told = self._told, self._attached
        return None if told == self._attached else self._attached

    def _say_change(self, facts: Callable[[], str]) -> None:
        if not self._attached:
            why = self._depot.trouble or "it hung up"
            logger.warning("kvdepot: the depot was lost (%s): the engine computes what it would have loaded", why)
        elif self._seen:
            logger.info("kvdepot: the depot is back%s", facts())
        else:
            logger.info("kvdepot: attached to the depot%s", facts())
        self._seen = self._seen or self._attached

    def _complain(self, waited_s: float) -> None:
        place = self._place
        logger.error("kvdepot: %s", absence(place.socket, self._depot.trouble, waited_s, starts=place.starts))

    def _facts(self) -> str:
        """Returns the depot's facts in brackets; empty if it does not answer in time."""
        try:
            found = self._depot.stats().get("depot") or {}
            return f" (pid {found['pid']}, pool of {found['pool_bytes'] / GIB:.1f} GiB)"
        except Exception:  # noqa: BLE001 - a line in a log is worth no error
            return ""


def taken_sizes(config: "KVDepotConfig") -> list[str]:
    """Returns a sentence for each resource of the machine that the depot this engine starts takes by default."""
    if not config.start_depot:
        return []
    rules = {key.name: key.facts.by_default for key in type(config).key_table()}
    return [
        f"{one.key} is not set, so a depot that this engine starts takes {_amount(one.value)} {one.unit}".rstrip()
        + f" ({rules[one.key]})"
        for one in config.effective(Machine.here())
        if one.key not in config.model_fields_set and rules[one.key] and one.value is not None and one.key in TAKEN
    ]


def _amount(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
