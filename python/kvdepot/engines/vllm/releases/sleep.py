"""Sleep mode: vLLM takes the memory away from the KV cache's pages, and gives it back at the same addresses.

From 0.33 on vLLM calls hooks of the connector before and after. Earlier releases notify a connector of neither: a
running copy would touch memory that does not exist, and registrations with a driver or an adapter would refer to freed
memory. There the worker's own methods are wrapped.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

PAGES_TAG = "kv_cache"
HOOK = "unregister_kv_caches"


class UnwatchedSleepError(RuntimeError):
    """Sleep could not be noticed: there is no worker to watch."""


def may_sleep(model_config: "ModelConfig") -> bool:
    """Returns whether vLLM can take the pages' memory away.

    On GPUs the KV cache is in the memory that sleeps with either option: sleep mode implies the allocator.
    """
    sleeps = getattr(model_config, "enable_sleep_mode", False)
    return bool(sleeps or getattr(model_config, "enable_cumem_allocator", False))


def calls_hooks(base: type) -> bool:
    """Returns whether vLLM itself calls the connector around its sleep; ``base`` is vLLM's class of connectors."""
    return hasattr(base, HOOK)


def watch_sleep(worker: Any, before_sleep: Callable[[], None], after_wake_up: Callable[[], None]) -> None:
    """Calls ``before_sleep`` before vLLM's worker takes the pages' memory away, ``after_wake_up`` when it is back.

    Raises:
        UnwatchedSleepError: there is no worker to watch. A copy during its sleep would kill the engine, and
            registrations with an RDMA adapter would keep referring to the old memory.
    """
    if worker is None:
        raise UnwatchedSleepError(
            "this version of vLLM does not expose its worker, so copies could run during its sleep: start it without "
            "--enable-sleep-mode and --enable-cumem-allocator, or without the connector"
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
