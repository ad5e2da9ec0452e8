"""What is killed: a kind of model on a number of ranks, as its engine, its depot and a judge of its answers see it."""

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
    # In bfloat16 the usual spread makes rounding errors as large as what one wrong block does.
    "mla": ModelSize(**SMALL, architecture="mla", initializer_range=0.03),
}
GROUPS = {"llama": 1, "gemma3": LAYERS, "mla": 1}
"""KV-cache groups: vLLM gives each layer one of its own where three slide and one does not."""


@dataclass(frozen=True)
class Subject:
    """A kind of model on a number of ranks."""

    kind: str
    ranks: int

    @property
    def model(self) -> ModelSize:
        """The model to make."""
        return KINDS[self.kind]

    @property
    def exact(self) -> bool:
        """Whether a token is the same wherever its context's KV came from.

        Not in bfloat16, where batches of other shapes round otherwise; vLLM's latent attention takes nothing else.
        """
        return self.kind != "mla"

    @property
    def dtype(self) -> str:
        """The model's type."""
        return "float32" if self.exact else "bfloat16"

    @property
    def namespaces(self) -> int:
        """So many blocks of the depot make one of the engine: one a group and rank, but ranks share latent KV."""
        return GROUPS[self.kind] * (1 if self.kind == "mla" else self.ranks)

    @property
    def block_bytes(self) -> int:
        """The size of one block of the depot."""
        return BLOCK_TOKENS * self.model.kv_bytes_per_token(self.dtype) // self.namespaces

    @property
    def engine(self) -> dict[str, Any]:
        """Arguments of the engine, but for the model's path and the connector."""
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
