"""The memory that a task reads or writes: torch tensors, numpy arrays, or raw addresses."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdepot.errors import ConfigError, UnsupportedError

Addresses: TypeAlias = npt.NDArray[np.uint64]
Buffers: TypeAlias = "Sequence[Sequence[Any]] | Addresses"


def memory_of(
    buffers: Buffers, sizes_bytes: Sequence[Sequence[int]], *, writable: bool, cuda_device: int | None = None
) -> tuple[Addresses, tuple[object, ...]]:
    """Returns the addresses of rows of tensors, an array of shape ``(rows, tensors)``, and the memory's owners.

    The memory stays allocated as long as the owners are referenced, whatever happens to ``buffers``.

    Args:
        buffers: rows of tensors or arrays, or their addresses as a 2-D ``uint64`` array, which is taken on trust and
            has no owners.
        sizes_bytes: for each row that ``buffers`` must have, the size of each tensor in bytes; as many in every row.
        writable: whether the memory will be written (a load).
        cuda_device: number of the CUDA device that must hold the memory; ``None`` = host memory.

    Raises:
        ConfigError: a row or tensor is missing, has another size, is not contiguous, holds Python objects or may not be
            written.
        UnsupportedError: a tensor is in another memory.
    """
    rows = len(sizes_bytes)
    tensors_per_row = len(sizes_bytes[0]) if rows else 0
    if isinstance(buffers, np.ndarray):
        if rows == 0 and buffers.size == 0:
            return np.empty((0, 0), dtype=np.uint64), ()
        if buffers.dtype != np.uint64 or buffers.shape != (rows, tensors_per_row):
            raise ConfigError(
                f"addresses must be uint64 of shape {(rows, tensors_per_row)}, got {buffers.dtype} of {buffers.shape}"
            )
        return np.array(buffers, order="C"), ()
    if len(buffers) != rows:
        raise ConfigError(f"there must be one row of tensors for each hash, so {rows}; got {len(buffers)}")
    owners: list[object] = []
    addresses = np.empty((rows, tensors_per_row), dtype=np.uint64)
    for row, (tensors, sizes) in enumerate(zip(buffers, sizes_bytes, strict=True)):
        # Iterate only once: a sequence may create a new tensor on each access.
        held = tuple(tensors)
        if len(held) != len(sizes):
            raise ConfigError(f"row {row} must have {len(sizes)} tensors, got {len(held)}")
        for column, (tensor, size_bytes) in enumerate(zip(held, sizes, strict=True)):
            where = f"tensor [{row}][{column}]"
            # torch may later give a tensor another storage, so keep the storage alive, too.
            owners += (tensor, tensor.untyped_storage()) if hasattr(tensor, "untyped_storage") else (tensor,)
            addresses[row, column] = _address(tensor, size_bytes, where, writable, cuda_device)
    return addresses, tuple(owners)


def after_torch(cuda_device: int) -> tuple[int, object]:
    """Returns an event behind everything that was launched so far on torch's current stream of a device: handle, owner.

    Kernels that fill a tensor, or still use memory from which torch made it, run on that stream, and a copy must not
    overtake them (P3).
    """
    import torch

    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(cuda_device))
    return int(event.cuda_event), event


def _address(tensor: Any, size_bytes: int, where: str, writable: bool, cuda_device: int | None) -> int:
    if isinstance(tensor, np.ndarray):
        if cuda_device is not None:
            raise UnsupportedError(f"{where} is in host memory: the store was opened for CUDA device {cuda_device}")
        if tensor.dtype.hasobject:
            raise ConfigError(f"{where} holds Python objects ({tensor.dtype}): pass an array of plain numbers or bytes")
        contiguous, found_bytes, address = tensor.flags.c_contiguous, tensor.nbytes, tensor.ctypes.data
        if writable and not tensor.flags.writeable:
            raise ConfigError(f"{where} is read-only, but a load writes it: pass a writable array")
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
        raise ConfigError(f"{where} must be a torch tensor or a numpy array, got {type(tensor).__name__}")
    if not contiguous:
        raise ConfigError(f"{where} is not contiguous: pass tensor.contiguous(), or a view that is")
    if found_bytes != size_bytes:
        raise ConfigError(f"{where} must have {size_bytes} bytes as the layout says, got {found_bytes}")
    return int(address)
