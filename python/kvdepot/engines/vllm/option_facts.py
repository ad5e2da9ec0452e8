"""Options of vLLM that change the bytes of a block and that no other fact reflects (P8).

A table test has every field of vLLM's configuration and every variable of its environment, of each supported release,
with the fact that reflects it or the reason why it changes nothing; one that a release adds fails it
(``test_vllm_fields.py``).
"""

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from kvdepot.engines.vllm.groups import layer_specs

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

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


ENVIRONMENT: dict[str, tuple[object, ...]] = {
    # What activations are quantised to, and weights at load time.
    "VLLM_B12X_MOE_FP4_FORCE_A16": (False,),
    "VLLM_CPU_INT4_W4A8": (True,),
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": (None, {}),
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": (None, {}),
    "VLLM_MARLIN_INPUT_DTYPE": (None,),
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD": (False,),
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": (True,),
    "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS": (False,),
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN": (False,),
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT": ("",),
    "VLLM_ROCM_USE_AITER_FP4BMM": (True,),
    "VLLM_ROCM_USE_AITER_FP8BMM": (True,),
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": (None, False),
    "VLLM_ROCM_USE_AITER_MOE_SITUV2": ("auto",),
    "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4": (False,),
    "VLLM_XPU_INC_WNA16_BACKEND": ("auto",),
    # What ranks send each other.
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": (False,),
    "VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION": (False,),
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": (False,),
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE": ("fp32",),
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16": (True,),
    "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB": (None,),
    "VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB": (None,),
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": ("NONE",),
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB": (None,),
    # Numbers with fewer bits within a kernel.
    "VLLM_FLOAT32_MATMUL_PRECISION": ("highest",),
    "VLLM_HUMMING_USE_F16_ACCUM": (False,),
    # They choose kernels as linear_backend and moe_backend do.
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": (True,),
    "VLLM_DISABLED_KERNELS": ([],),
    "VLLM_MOE_USE_DEEP_GEMM": (True,),
    "VLLM_ROCM_USE_AITER": (False,),
    "VLLM_ROCM_USE_AITER_LINEAR": (True,),
    "VLLM_ROCM_USE_AITER_MOE": (True,),
    "VLLM_USE_DEEP_GEMM": (True,),
    "VLLM_USE_DEEP_GEMM_E8M0": (True,),
    "VLLM_USE_FLASHINFER_MOE_INT4": (False,),
    # Where the bytes of a block are.
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": (False,),
    # Other code, other experts, other frames of a video, other input of a draft.
    "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM": (False,),
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": ("",),
    "VLLM_USE_HW_AGNOSTIC": (False,),
    "VLLM_VIDEO_LOADER_BACKEND": ("opencv",),
}
"""Variables of ``vllm.envs``, with the values that change nothing, as vLLM reads them."""


STATE_OPTIONS = ("mamba_cache_dtype", "mamba_ssm_cache_dtype", "use_replayssm")
"""Options of states. On some CPUs vLLM sets one for every model."""

NEMOTRON_H = ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "NemotronH_Nano_VL_V2")
QWEN_3_5 = (
    "ColQwen3_5",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)


def option_facts(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> dict[str, object]:
    """Returns the options that change bytes; nothing if they have the values that most engines have."""
    found: dict[str, str] = {}
    for name, fields in CHANGES.items():
        config = vllm_config if name == "vllm_config" else getattr(vllm_config, name)
        found.update(_set(config, fields))
    for option, value in _of_model(vllm_config.model_config).items():
        if found.get(option) == as_text(value):
            del found[option]
    if not _has_states(kv_cache_config):
        found = {option: value for option, value in found.items() if option not in STATE_OPTIONS}
    found.update(_environment())
    return {"options": found} if found else {}


def _of_model(model: "ModelConfig") -> dict[str, object]:
    """Returns the values that vLLM itself puts in the place of the usual ones for some models.

    They follow from the model's configuration, which is a fact, and whoever chooses the same value has the same KV.
    """
    architecture = model.architecture
    if architecture in NEMOTRON_H:
        return {"mamba_ssm_cache_dtype": getattr(model.hf_text_config, "mamba_ssm_cache_dtype", "float32")}
    if architecture in QWEN_3_5:
        return {"mamba_ssm_cache_dtype": getattr(model.hf_text_config, "mamba_ssm_dtype", "auto")}
    return {}


def _has_states(kv_cache_config: "KVCacheConfig") -> bool:
    specs = (spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group.kv_cache_spec))
    return any(hasattr(spec, "mamba_cache_mode") for spec in specs)


def _environment() -> dict[str, str]:
    """Returns the variables that change bytes, as vLLM reads them: it knows defaults, spellings, and files."""
    here = {name: usual for name, usual in ENVIRONMENT.items() if name in os.environ}
    if not here:
        return {}
    from vllm import envs

    return _set(envs, here)


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
