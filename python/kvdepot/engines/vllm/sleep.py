"""Sleep mode: vLLM takes the memory away from the KV cache's pages, and gives it back at the same addresses.

vLLM up to 0.32 tells a connector neither. A copy that still ran would touch memory that is not there, and what was
registered with a driver or an adapter would name memory that is gone. So the worker's own methods say it.
"""

from collections.abc import Callable
from typing import Any

from kvdepot.engines.vllm.log import connector_logger

logger = connector_logger()

PAGES_TAG = "kv_cache"


def watch_sleep(worker: Any, before_sleep: Callable[[], None], after_wake_up: Callable[[], None]) -> None:
    """Calls ``before_sleep`` before vLLM's worker takes the pages' memory away, ``after_wake_up`` when it is back."""
    if worker is None:
        logger.warning("kvdepot: sleep mode: this version of vLLM does not show its worker, copies may meet its sleep")
        return
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
