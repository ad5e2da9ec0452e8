"""What the connector needs of vLLM, and the sentence for a release that lacks it."""

import importlib
from typing import Any

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"

REQUIRED = (
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.register_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_connector_worker_meta",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.handle_preemptions",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorMetadata",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorWorkerMetadata",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats",
    "vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes",
    "vllm.v1.core.sched.output:SchedulerOutput.kv_connector_block_state",
    "vllm.v1.kv_cache_layout:KVCacheLayout",
)
"""Names without which the connector cannot run, as ``module:name`` or ``module:class.member``."""

BY_HAND = (
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory._registry",
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.get_connector_class",
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter",
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs.kv_cache_specs",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.get_model",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.speculator",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.drafter",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model",
    "vllm.v1.worker.gpu_worker:Worker.discard",
    "vllm.v1.worker.gpu_worker:Worker.finish_weight_update",
    "vllm.v1.worker.gpu_worker:Worker.reload_weights",
    "vllm.v1.worker.gpu_worker:Worker.reset_weights",
    "vllm.v1.worker.gpu_worker:Worker.sleep",
    "vllm.v1.worker.gpu_worker:Worker.start_draft_weight_update",
    "vllm.v1.worker.gpu_worker:Worker.start_weight_update",
    "vllm.v1.worker.gpu_worker:Worker.update_weights",
    "vllm.v1.worker.gpu_worker:Worker.wake_up",
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.lora_manager",
)
"""Names that the connector uses and that neither an import nor a type shows: they are listed here once.

Through stack frames ``live`` finds the model's runner, ``loaded_adapters`` its adapters, ``releases.sleep`` and
``releases.updates`` the worker, and ``early`` the argument of the factory. A group of different layers is recognised by
its attribute.
"""


def problem() -> str:
    """Returns why this vLLM is not supported, and what to do; empty if it is."""
    missing = [name for name in REQUIRED if not has(name)]
    if not missing:
        return ""
    import vllm

    return (
        f"kvdepot does not support vLLM {vllm.__version__}, which has no {missing[0].replace(':', '.')}: use vLLM 0.29 "
        "or later, or a newer kvdepot"
    )


def problem_of_groups(count: int) -> str:
    """Returns why this vLLM cannot have its cache stored if it has ``count`` KV-cache groups; empty if it can."""
    if count > 1 and not has(f"{BASE}.get_transfer_results"):
        return "this version of vLLM exits at the first failed load of a hybrid model: use 0.30 or later"
    return ""


def problem_of_states() -> str:
    """Returns why this vLLM cannot have the states of Mamba layers stored; empty if it can."""
    if has(f"{BASE}.get_loaded_kv_cache_group_ids"):
        return ""
    return "this version of vLLM may clear blocks of a hybrid model while they are loaded: use 0.32 or later"


def has(name: str) -> bool:
    """Returns whether this vLLM has ``module:name`` or ``module:class.member``."""
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError:
        return False
    for part in path.split("."):
        # A field without a default is no attribute of its dataclass.
        if part in getattr(found, "__dataclass_fields__", ()):
            return True
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True
