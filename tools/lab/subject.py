"""The subject of a kill test: a kind of model on a number of ranks, as its engine, its depot and its judge see it."""

from dataclasses import dataclass
from typing import Any

from tools.lab.models import ModelSize

BLOCK_TOKENS = 32
LAYERS = 4
MEMORY_BYTES = 64 << 20
SMALL: dict[str, Any] = {
    "layers": LAYERS,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate": 512,
}
KINDS = {
    "llama": ModelSize(**SMALL),
    # A window so short that most blocks of a prompt are outside of it.
    "gemma3": ModelSize(**SMALL, architecture="gemma3", sliding_window=96),
    # In bfloat16 the usual spread makes rounding errors as large as the effect of one wrong block.
    "mla": ModelSize(**SMALL, architecture="mla", initializer_range=0.03),
}
GROUPS = {"llama": 1, "gemma3": LAYERS, "mla": 1}
"""Number of KV-cache groups: vLLM gives each layer its own where three slide and one does not."""


@dataclass(frozen=True)
class Subject:
    """A kind of model on a number of ranks."""

    kind: str
    ranks: int

    @property
    def model(self) -> ModelSize:
        """Model to generate."""
        return KINDS[self.kind]

    @property
    def exact(self) -> bool:
        """Whether a token is independent of where its context's KV came from.

        Not in bfloat16, where batches of other shapes round differently; vLLM's latent attention requires bfloat16.
        """
        return self.kind != "mla"

    @property
    def dtype(self) -> str:
        """Data type of the model."""
        return "float32" if self.exact else "bfloat16"

    @property
    def namespaces(self) -> int:
        """Number of depot blocks per engine block: one per group and rank, but ranks share latent KV."""
        return GROUPS[self.kind] * (1 if self.kind == "mla" else self.ranks)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the depot."""
        return BLOCK_TOKENS * self.model.kv_bytes_per_token(self.dtype) // self.namespaces

    @property
    def engine(self) -> dict[str, Any]:
        """Arguments of the engine, except for the model's path and the connector."""
        return {
            "dtype": self.dtype,
            "tensor_parallel_size": self.ranks,
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": MEMORY_BYTES,
            "max_model_len": 1024,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 4,
        }
