"""What a log says when no depot answers: after how long, why, and the last words of one that could not start."""

import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvdepot.config import KVDepotConfig

LAST_WORDS_MAX = 4096


class Attached(Protocol):
    """The part of a ``Depot`` that is used here."""

    @property
    def attached(self) -> bool:
        """Whether calls currently reach a depot."""

    @property
    def trouble(self) -> str:
        """Why none is attached."""


def last_words(log_file: str) -> str:
    """Returns the depot's last log line: usually the reason why it could not start."""
    try:
        with open(log_file, encoding="utf-8", errors="replace") as file:
            lines = file.read()[-LAST_WORDS_MAX:].strip().splitlines()
    except OSError:
        return "It has written no log."
    return f"Its log {log_file} ends: {lines[-1]}" if lines else f"Its log {log_file} is empty."


def absence(socket: str, trouble: str, waited_s: float, *, starts: bool) -> str:
    """Returns the sentences about a depot that does not answer.

    Args:
        socket: where it is expected.
        trouble: the reason, if any is known.
        waited_s: seconds that it was waited for.
        starts: whether this process starts it.
    """
    hint = last_words(f"{socket}.log") if starts else "start_depot is false: is kvdepot serve running?"
    return (
        f"no depot answers at {socket} after {waited_s:.0f} s ({trouble or 'no reason known'}): "
        f"everything is a miss until one does, and it is tried again. {hint}"
    )


def tell_if_absent(
    depot: Attached, config: "KVDepotConfig", socket: str, waited_s: float, logger: logging.Logger
) -> None:
    """Logs once, after an attempt to attach, that no depot answers. One that others start may still come up."""
    if not depot.attached:
        level = logging.ERROR if config.start_depot else logging.WARNING
        logger.log(level, "kvdepot: %s", absence(socket, depot.trouble, waited_s, starts=config.start_depot))
