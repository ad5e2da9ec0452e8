"""Addresses of the memory that a task reads or writes: torch tensors, numpy arrays, or raw addresses."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdepot.errors import UnsupportedError, config_error

Addresses: TypeAlias = npt.NDArray[np.uint64]
Buffers: TypeAlias = "Sequence[Sequence[Any]] | Addresses"


def addresses_of(
    buffers: Buffers, rows: int, sizes_bytes: Sequence[int], *, writable: bool, cuda_device: int | None = None
) -> Addresses:
    """Addresses of ``rows`` rows of tensors, each row with the sizes ``sizes_bytes``.

    Args:
        buffers: rows of tensors or arrays, or their addresses as a 2-D ``uint64`` array, which is taken on trust.
        rows: how many rows there must be.
        sizes_bytes: what each tensor of a row must have, in bytes.
        writable: whether the memory will be written (a load).
        cuda_device: number of the CUDA device that must hold the memory; ``None`` = host memory.

    Raises:
        ConfigError: a row or tensor is missing, has another size, is not contiguous or may not be written.
        UnsupportedError: a tensor is in another memory.
    """
    if isinstance(buffers, np.ndarray):
        if buffers.dtype != np.uint64 or buffers.shape != (rows, len(sizes_bytes)):
            raise config_error(
                f"addresses must be uint64 of shape {(rows, len(sizes_bytes))}, got {buffers.dtype} of {buffers.shape}"
            )
        return np.ascontiguousarray(buffers)
    if len(buffers) != rows:
        raise config_error(f"there must be one row of tensors a shard: {rows}, got {len(buffers)}")
    addresses = np.empty((rows, len(sizes_bytes)), dtype=np.uint64)
    for row, tensors in enumerate(buffers):
        if len(tensors) != len(sizes_bytes):
            raise config_error(f"row {row} must have {len(sizes_bytes)} tensors, got {len(tensors)}")
        for column, (tensor, size_bytes) in enumerate(zip(tensors, sizes_bytes, strict=True)):
            where = f"tensor [{row}][{column}]"
            addresses[row, column] = _address(tensor, size_bytes, where, writable, cuda_device)
    return addresses


def _address(tensor: Any, size_bytes: int, where: str, writable: bool, cuda_device: int | None) -> int:
    if isinstance(tensor, np.ndarray):
        if cuda_device is not None:
            raise UnsupportedError(f"{where} is in host memory: the store was opened for CUDA device {cuda_device}")
        contiguous, found_bytes, address = tensor.flags.c_contiguous, tensor.nbytes, tensor.ctypes.data
        if writable and not tensor.flags.writeable:
            raise config_error(f"{where} is read-only, but a load writes it: pass a writable array")
    elif hasattr(tensor, "data_ptr") and hasattr(tensor, "is_contiguous"):
        here = tensor.device.type == "cpu" if cuda_device is None else str(tensor.device) == f"cuda:{cuda_device}"
        if not here:
            wanted = (
                "host memory: pass cuda_device to kvdepot.open" if cuda_device is None else f"CUDA device {cuda_device}"
            )
            raise UnsupportedError(f"{where} is on {tensor.device}: the store was opened for {wanted}")
        contiguous, found_bytes = tensor.is_contiguous(), tensor.numel() * tensor.element_size()
        address = tensor.data_ptr()
    else:
        raise config_error(f"{where} must be a torch tensor or a numpy array, got {type(tensor).__name__}")
    if not contiguous:
        raise config_error(f"{where} is not contiguous: pass tensor.contiguous(), or a view that is")
    if found_bytes != size_bytes:
        raise config_error(f"{where} must have {size_bytes} bytes as the layout says, got {found_bytes}")
    return int(address)
