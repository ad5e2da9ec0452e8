"""Options of vLLM that change the bytes of a block and that no other fact reflects (P8).

A table test has every field of vLLM's configuration, of each supported release, with the fact that reflects it or the
reason why it changes nothing; a field that a release adds fails it (``test_vllm_fields.py``).
"""

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TEXT_MAX = 300

CHANGES: dict[str, dict[str, tuple[object, ...]]] = {
    "cache_config": {
        # Which layers are quantised; the other layers of such a model compute on what these hold.
        "kv_cache_dtype_skip_layers": ([],),
        "mamba_cache_dtype": ("auto",),
        "mamba_ssm_cache_dtype": ("auto",),
        "use_replayssm": (False,),
    },
    "attention_config": {
        "disable_flashinfer_q_quantization": (False,),
        "indexer_kv_dtype": ("auto",),
        "indexer_sparse_logits": (False,),
        "use_fp4_indexer_cache": (False,),
        "use_non_causal": (False,),
        "use_prefill_query_quantization": (False,),
    },
    # These choose whether activations are quantised, and how.
    "kernel_config": {
        "linear_backend": ("auto",),
        "linear_backend_per_quant": (None, {}),
        "moe_backend": ("auto",),
    },
    # Other code for the same model. vLLM's own is what "auto" takes where it has one.
    "model_config": {"code_revision": (None,), "model_impl": ("auto", "vllm")},
    "vllm_config": {"additional_config": (None, {}), "diffusion_config": (None,)},
}
"""Fields by the configuration that has them, each with the values that change nothing."""

LORA_CHANGES: dict[str, tuple[object, ...]] = {"lora_dtype": ("auto",), "target_modules": (None,)}
"""The same for ``LoRAConfig``: they change what an adapter does, and nothing without one."""


def option_facts(vllm_config: "VllmConfig") -> dict[str, object]:
    """Returns the options that change bytes; nothing if they have the values that most engines have."""
    found: dict[str, str] = {}
    for name, fields in CHANGES.items():
        config = vllm_config if name == "vllm_config" else getattr(vllm_config, name)
        found.update(_set(config, fields))
    return {"options": found} if found else {}


def lora_options(vllm_config: "VllmConfig") -> dict[str, str]:
    """Returns the options that change what a LoRA adapter does; nothing without one."""
    lora = vllm_config.lora_config
    if lora is None:
        return {}
    found = _set(lora, LORA_CHANGES)
    if found.get("lora_dtype") == as_text(vllm_config.model_config.dtype):
        del found["lora_dtype"]  # vLLM has put the model's in the place of "auto"
    return found


def _set(config: Any, fields: dict[str, tuple[object, ...]]) -> dict[str, str]:
    # A release without a field has none of its effects.
    values = {name: getattr(config, name) for name in fields if hasattr(config, name)}
    return {name: as_text(value) for name, value in values.items() if value not in fields[name]}


def as_text(value: Any) -> str:
    """Returns an option as text that is the same in every process, or its digest if that is too long."""
    if hasattr(value, "compute_hash"):
        return str(value.compute_hash())
    if isinstance(value, list):
        value = sorted(map(str, value))
    text = json.dumps(value, sort_keys=True, default=repr) if isinstance(value, (dict, list)) else str(value)
    return text if len(text) <= TEXT_MAX else hashlib.sha256(text.encode()).hexdigest()[:32]
