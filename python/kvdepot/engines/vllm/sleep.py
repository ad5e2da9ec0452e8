"""Sleep mode: vLLM takes the memory away from the KV cache's pages, and gives it back at the same addresses.

vLLM up to 0.32 tells a connector neither. A copy that still ran would touch memory that is not there, and what was
registered with a driver or an adapter would name memory that is gone. So the worker's own methods say it.
"""

from collections.abc import Callable
from typing import Any

PAGES_TAG = "kv_cache"


class UnwatchedSleepError(RuntimeError):
    """Nobody would say when the pages' memory goes away."""


def watch_sleep(worker: Any, before_sleep: Callable[[], None], after_wake_up: Callable[[], None]) -> None:
    """Calls ``before_sleep`` before vLLM's worker takes the pages' memory away, ``after_wake_up`` when it is back.

    Raises:
        UnwatchedSleepError: there is no worker to be watched. A copy that met its sleep would end the engine, and what
            is registered with an RDMA adapter would go on naming the memory from before.
    """
    if worker is None:
        raise UnwatchedSleepError(
            "this version of vLLM does not show its worker, so copies would meet its sleep: start it without "
            "--enable-sleep-mode, or without the connector"
        )
    sleep, wake_up, discard = worker.sleep, worker.wake_up, getattr(worker, "discard", None)

    def sleep_after_copies(*args: Any, **kwargs: Any) -> Any:
        before_sleep()
        return sleep(*args, **kwargs)

    def wake_up_and_register(tags: list[str] | None = None) -> Any:
        result = wake_up(tags)
        if tags is None or PAGES_TAG in tags:
            after_wake_up()
        return result

    worker.sleep, worker.wake_up = sleep_after_copies, wake_up_and_register
    if discard is None:
        return

    def discard_after_copies(tags: tuple[str, ...]) -> Any:
        if PAGES_TAG in tags:
            before_sleep()
        return discard(tags)

    worker.discard = discard_after_copies
