"""When the copies of a task have ended: engines reuse its memory only afterwards."""

import math
import time
from collections.abc import Callable
from typing import Any

from kvdepot.errors import is_failure

DONE_AGAIN_S = 0.01
LIMITS = 3
"""Time limits of a task for which it is asked: the core ends it after one, unless its timer has failed, too."""


def copied(task: Any, broken: Callable[[str], None], limit_s: float) -> bool:
    """Waits until a task copies no more, which its time limit bounds.

    A failure of the wait, such as a panic of the core, is no end: the task is then asked until it says that it is done,
    or for a multiple of its time limit.

    Args:
        task: the task.
        broken: is told if the wait fails.
        limit_s: the task's time limit.

    Returns:
        False if the task does not tell. It may copy as long as this process lives.
    """
    try:
        task.wait_done()
    except BaseException as error:
        if not is_failure(error):
            raise
        broken(f"the wait for it failed: {error!r}")
    else:
        return True
    try:
        for _ in range(math.ceil(LIMITS * limit_s / DONE_AGAIN_S)):
            if task.done():
                return True
            time.sleep(DONE_AGAIN_S)
    except BaseException as error:
        if not is_failure(error):
            raise
        broken(f"it does not tell whether it has ended: {error!r}")
        return False
    broken(f"it has not ended within {LIMITS} times its time limit of {limit_s:g} s")
    return False
