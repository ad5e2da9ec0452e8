"""Runs one of our programs to its end: its children end with it, and a failure is one line."""

from collections.abc import Callable

from tools.lab.child import ChildError, end_on_signals
from tools.lab.progress import Progress

FAILED, INTERRUPTED = 1, 130


def run_program(body: Callable[[Progress], int], failures: tuple[type[Exception], ...] = (ChildError,)) -> int:
    """Returns the exit status of ``body``, or of how it ended; the text of ``failures`` is self-explanatory."""
    end_on_signals()
    progress = Progress()
    try:
        return body(progress)
    except failures as error:
        progress.failure(str(error))
        return FAILED
    except KeyboardInterrupt:
        progress.failure("interrupted; nothing is left running")
        return INTERRUPTED
