"""`BLHNC` is requested only for block sizes that no attention backend splits into kernel blocks."""

import planted

planted.plant()

import pytest  # noqa: E402
from vllm.v1.attention.backend import MultipleOf  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

from kvdepot.engines.vllm.connector import UNSPLIT_BLOCK_SIZES  # noqa: E402

ANY_LAYOUT = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")


def is_one_kernel_block(backend: str, block: int) -> bool:
    sizes = AttentionBackendEnum[backend].get_class().get_supported_kernel_block_sizes()
    return any(block % size.base == 0 if isinstance(size, MultipleOf) else block == size for size in sizes)


@pytest.mark.parametrize("backend", ANY_LAYOUT)
@pytest.mark.parametrize("block", UNSPLIT_BLOCK_SIZES)
def test_blocks_of_these_sizes_are_kernel_blocks(backend: str, block: int) -> None:
    assert is_one_kernel_block(backend, block)


def test_flashinfer_splits_blocks_of_128() -> None:
    """So vLLM would not start with them and `BLHNC`; its choice of backend is not known when it asks for the layout."""
    assert [backend for backend in ANY_LAYOUT if not is_one_kernel_block(backend, 128)] == ["FLASHINFER"]
