"""Where a vLLM looks for the node's depot, and what stands for it when there is none."""

from typing import TYPE_CHECKING

from kvdepot.engines.vllm.options import ConnectorOptions

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class NoDepot:
    """Placeholder for a depot when the connector is off for good: nothing is attached, started or asked."""

    attached = False
    trouble = "the connector is off"

    def close(self) -> None:
        """Does nothing."""


def socket_of(
    options: ConnectorOptions, kv_cache_config: "KVCacheConfig", engine_id: str, pipeline_stages: int
) -> tuple[str, int | None]:
    """Returns the depot's socket, and the bytes of a block if all of the engine's processes agree on them.

    Scheduler and workers are separate processes that reach the same depot because each computes the same path. Stages
    may hold different numbers of layers, and must not look for different depots.
    """
    block_bytes = bytes_per_block(kv_cache_config) if pipeline_stages == 1 else None
    return options.config.socket_path(block_bytes, suffix=engine_id), block_bytes


def bytes_per_block(kv_cache_config: "KVCacheConfig") -> int:
    """Returns the bytes of a block over all layers of a rank: every cache tensor describes one backing allocation."""
    sizes = [tensor.size for tensor in kv_cache_config.kv_cache_tensors]
    return max(sizes, default=0) // kv_cache_config.num_blocks
