"""What every call of SGLang goes through: it never raises, and answers nothing once other weights were loaded."""

from collections.abc import Callable
from typing import TypeVar

from kvdepot.engines.counters import Counters
from kvdepot.engines.sglang import engine
from kvdepot.errors import is_failure

Answer = TypeVar("Answer")


class Guard:
    """Turns failures into misses, which it counts by kind. Any number of threads may use it.

    Args:
        counters: count failures.
        remedy: how the user turns kvdepot on again after an update of the weights.
    """

    def __init__(self, counters: Counters, remedy: str) -> None:
        self._counters = counters
        self._remedy = remedy
        self._arguments = engine.server_arguments()
        self._version = engine.current_weights(self._arguments)
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether everything is a miss because the face was closed."""
        return self._closed

    def close(self) -> None:
        """Makes everything a miss from now on. Idempotent."""
        self._closed = True

    def answered(self, verb: str, pages: int, ask: Callable[[], Answer], missed: Answer) -> Answer:
        """Returns the result of ``ask``, or ``missed`` on failure."""
        if self._closed:
            return missed
        try:
            return ask() if self.has_weights_of_start(pages) else missed
        except BaseException as error:  # nothing is raised into SGLang: its ranks would wait for each other
            if not is_failure(error):
                raise
            self._counters.trouble(f"{verb}_error", f"a {verb} failed: {error!r}", pages)
            return missed

    def has_weights_of_start(self, pages: int) -> bool:
        """Returns whether SGLang has been given no other weights since its start.

        After an update, pages of the earlier weights may still be queued for writing, so neither namespace is correct.
        """
        version = engine.current_weights(self._arguments)
        if version == self._version:
            return True
        self._counters.trouble(
            "other_weights",
            f"off, since the weights were {self._version!r} and are {version!r}: {self._remedy}",
            pages,
        )
        return False
