"""How a step of vLLM's model runner deviates from the order that the connector's hooks suggest.

vLLM has two model runners, which call the same hooks at different moments. What matters here is when pages are first
written to, and when a layer, or all layers, have been computed.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True)
class StepOrder:
    """An engine's deviations; by default there are none.

    Attributes:
        clears_first: new pages are cleared, or copied into, before ``handle_preemptions``: the second runner does that
            with caches whose pages have to be cleared.
        microbatches: a step runs each layer, and its hook, once for every part of the batch (dual-batch overlap).
        defers_saves: ``wait_for_save`` follows only after the draft's forward, so it is never called on a pipeline
            stage that has no draft: the first runner with speculative decoding.
        ends_whole_steps: ``wait_for_save`` follows only a forward that has succeeded: the second runner. The first one
            calls it in a ``finally``, so there an exception that propagates is the only sign of a failure.
    """

    clears_first: bool = False
    microbatches: bool = False
    defers_saves: bool = False
    ends_whole_steps: bool = False


def step_order(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> StepOrder:
    """Returns the deviations of an engine; the same in its scheduler and in its workers."""
    second_runner = bool(getattr(vllm_config, "use_v2_model_runner", False))
    return StepOrder(
        clears_first=second_runner and bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", True)),
        microbatches=bool(getattr(vllm_config.parallel_config, "use_ubatching", False)),
        defers_saves=not second_runner and getattr(vllm_config, "speculative_config", None) is not None,
        ends_whole_steps=second_runner,
    )
