"""Updates of the weights: methods of vLLM's worker that write them, called through ``collective_rpc``.

No release notifies a connector of an update, which may take less time than passes between two steps. So the worker's
own methods are wrapped, as for sleep. A callable that is passed to ``collective_rpc`` writes without them.
"""

from collections.abc import Callable
from typing import Any

BEGIN = ("start_weight_update", "start_draft_weight_update")
END = ("finish_weight_update",)
"""From the first kind to the second, weights may arrive on the device at any time."""

WHOLE = ("reload_weights", "reset_weights")
"""Updates in one call."""

PART = "update_weights"
"""A part of an update that has begun."""


def watch_updates(worker: Any, updated: Callable[[bool], None]) -> None:
    """Calls ``updated`` before and after vLLM's worker writes weights: whether an update is under way.

    A release that lacks a method is watched by the others; without a worker there is nothing to watch.
    """
    for name in (*BEGIN, PART, *END, *WHOLE):
        method = getattr(worker, name, None)
        if method is not None:
            setattr(worker, name, _watched(method, updated, goes_on=name in (*BEGIN, PART)))


def _watched(method: Callable[..., Any], updated: Callable[[bool], None], *, goes_on: bool) -> Callable[..., Any]:
    def write(*args: Any, **kwargs: Any) -> Any:
        updated(True)
        try:
            result = method(*args, **kwargs)
        except BaseException:
            updated(False)  # vLLM ends an update that fails
            raise
        updated(goes_on)
        return result

    return write
