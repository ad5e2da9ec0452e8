"""The table of cases: model family, attention backend, layout, sizes and ranks."""

from dataclasses import dataclass

ALL_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
COMPACT = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
"""Layouts that keep a layer's part of a block together."""

BLOCKS, MANY_BLOCKS = 8, 16
"""Blocks of a cache: enough for the self-test, and for one request where each of many groups needs some."""


@dataclass(frozen=True)
class Case:
    """One engine.

    Attributes:
        layout: layout requested of vLLM, or ``None`` for its own choice.
        capability: CUDA's major compute capability.
        refused: part of the reason for which the connector is off.
        ran: where a real vLLM ran it.
        states: vLLM's ``mamba_cache_mode``.
    """

    family: str
    backend: str
    layout: str | None = None
    block: int = 16
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    cache_dtype: str = "auto"
    capability: int = 9
    hybrid: bool = True
    refused: str = ""
    ran: str = ""
    states: str = "align"

    @property
    def blocks(self) -> int:
        """Blocks of the cache."""
        return MANY_BLOCKS if self.family in (GEMMA, LLAMA4, V4) else BLOCKS

    def __str__(self) -> str:
        parts = [self.family, self.backend, self.layout or "", str(self.block)]
        parts += [f"{name}{n}" for name, n in (("tp", self.tp), ("pp", self.pp), ("dcp", self.dcp)) if n > 1]
        parts += [self.cache_dtype] * (self.cache_dtype != "auto") + [f"sm{self.capability}0"] * (self.capability != 9)
        parts += ["flat"] * (not self.hybrid) + [self.states] * (self.states != "align")
        return "-".join(part for part in parts if part)


LLAMA, GEMMA, GPT_OSS, LLAMA4 = "Llama-3-8B", "Gemma3-27B", "gpt-oss-120b", "Llama4-Scout"
V3, V32, V4 = "DeepSeek-V3", "DeepSeek-V3.2", "DeepSeek-V4"
CPU = "tests/engine, on a CPU"


def _swept() -> list[Case]:
    """Every layout with the backends that take any, and every backend with vLLM's default layout."""
    cases = [
        Case(LLAMA, backend, layout, block)
        for backend in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
        for layout in ALL_LAYOUTS
        for block in (16, 128)
        # A kernel for blocks of 64 splits those of 128, which vLLM refuses if other heads lie between them.
        if not (backend == "FLASHINFER" and block == 128 and layout == "LHBNC")
    ]
    cases += [Case(V3, "FLASHMLA", layout, 64) for layout in ALL_LAYOUTS]
    cases += [Case(V3, "FLASHMLA", layout, 128) for layout in ALL_LAYOUTS if layout != "LHBNC"]
    return cases


CASES: tuple[Case, ...] = (
    Case(LLAMA, "CPU_ATTN", None, 128, ran=CPU),
    *_swept(),
    Case(LLAMA, "FLASH_ATTN", None, 128, tp=2),
    Case(LLAMA, "FLASH_ATTN", None, 16, tp=8),
    Case(LLAMA, "FLASH_ATTN", None, 16, pp=2),
    Case(LLAMA, "FLASH_ATTN", None, 16, tp=16, dcp=2),
    Case(LLAMA, "FLASH_ATTN", None, 16, cache_dtype="fp8"),
    Case(LLAMA, "FLASHINFER", None, 16, cache_dtype="fp8"),
    Case(LLAMA, "FLASHINFER", None, 16, capability=10),
    Case(LLAMA, "FLASHINFER", None, 128, capability=10),
    Case(LLAMA, "FLASHINFER", None, 16, cache_dtype="nvfp4", capability=10),
    Case(LLAMA, "TRITON_ATTN", None, 16, cache_dtype="fp8_per_token_head"),
    Case(LLAMA, "TRITON_ATTN", None, 16, cache_dtype="int8_per_token_head"),
    Case(LLAMA, "TRITON_ATTN", None, 16, cache_dtype="int4_per_token_head"),
    Case(LLAMA, "FLEX_ATTENTION"),
    Case(LLAMA, "TURBOQUANT", cache_dtype="turboquant_4bit_nc"),
    Case(LLAMA, "TRITON_FLASH_ATTN"),
    Case(LLAMA, "TRITON_FLASHINFER", None, 64),
    Case(LLAMA, "HPC_ATTN", None, 64),
    Case(LLAMA, "B12X", None, 64, capability=12),
    Case("MiMo-V2", "FLASH_ATTN_DIFFKV"),
    Case("MiMo-V2", "TRITON_ATTN_DIFFKV"),
    Case(GEMMA, "CPU_ATTN", None, 128, ran=CPU),
    Case(GEMMA, "FLASH_ATTN"),
    Case(GEMMA, "FLASH_ATTN", "BLHNC"),
    Case(GEMMA, "FLASH_ATTN", hybrid=False),
    Case(GPT_OSS, "FLASH_ATTN"),
    Case(GPT_OSS, "TRITON_ATTN"),
    Case(GPT_OSS, "FLASHINFER", capability=10),
    Case(GPT_OSS, "FLASH_ATTN", None, 64, tp=2, pp=2),
    Case(LLAMA4, "FLASH_ATTN"),
    Case(LLAMA4, "FLASH_ATTN", None, 128, tp=4),
    Case(LLAMA4, "FLASH_ATTN", hybrid=False),
    Case(V3, "CPU_MLA", None, 128, ran=CPU),
    Case(V3, "TRITON_MLA"),
    Case(V3, "FLASH_ATTN_MLA"),
    Case(V3, "CUTLASS_MLA", None, 128, capability=10),
    Case(V3, "FLASHINFER_MLA", None, 64, capability=10),
    Case(V3, "TOKENSPEED_MLA", None, 64, capability=10),
    Case(V3, "FLASHMLA", None, 64, tp=8),
    Case(V3, "FLASHMLA", None, 64, tp=8, pp=2),
    Case(V3, "FLASHMLA", None, 64, tp=8, dcp=8),
    Case(V3, "FLASHMLA", None, 64, cache_dtype="fp8"),
    Case(V32, "FLASHMLA_SPARSE", None, 64),
    Case(V32, "FLASHMLA_SPARSE", "BLHNC", 64),
    Case(V32, "FLASHMLA_SPARSE", None, 64, cache_dtype="fp8_ds_mla"),
    Case(V32, "FLASHMLA_SPARSE", None, 64, tp=8, cache_dtype="fp8_ds_mla"),
    Case(V32, "FLASHINFER_MLA_SPARSE", None, 64, capability=10),
    Case(V32, "FLASHINFER_MLA_SPARSE_SM90", None, 64),
    Case(V4, "FLASHMLA_SPARSE_DSV4", None, 256, cache_dtype="fp8_ds_mla"),
    Case(V4, "FLASHMLA_SPARSE_DSV4", None, 256, tp=8, cache_dtype="fp8_ds_mla"),
    Case("Whisper-large", "FLASH_ATTN", refused="CrossAttentionSpec"),
    Case("Qwen3-Next", "FLASH_ATTN", None, 544),
    Case("Qwen3-Next", "FLASH_ATTN", "BLHNC", 544),
    Case("Qwen3-Next", "FLASH_ATTN", None, 544, refused="--mamba-cache-mode none", states="none"),
    Case("Nemotron-H", "FLASH_ATTN", None, 1056),
    Case("Kimi-Linear", "FLASHMLA", None, 2048),
)
