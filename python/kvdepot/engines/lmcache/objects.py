"""LMCache's memory objects: their address and layout."""

from typing import Any

from kvdepot.engines.lmcache.facts import Layout, UnknownLayoutError


def address_of(memory: Any, layout: Layout) -> int:
    """Returns the host address of an object's first byte; ``layout.size_bytes`` bytes there belong to the object.

    Raises:
        UnknownLayoutError: the object's size differs from the layout's, or it is not in host memory.
    """
    tensor = memory.raw_tensor
    if tensor is None:
        raise UnknownLayoutError("LMCache has freed the object, or keeps it outside of this process")
    if tensor.device.type != "cpu":
        raise UnknownLayoutError(f"the object is on {tensor.device}: only objects in host memory are copied")
    size, room = int(memory.get_size()), int(memory.get_physical_size())
    if size != layout.size_bytes or room < size:
        raise UnknownLayoutError(
            f"the object has {size} bytes in {room} bytes of memory, but its tensors have {layout.size_bytes}"
        )
    return int(memory.data_ptr)


def layout_of(memory: Any, model: str, form: str = "") -> Layout:
    """Returns an object's layout.

    Raises:
        UnknownLayoutError: LMCache does not describe the object completely.
    """
    meta = memory.metadata
    shapes = meta.shapes if meta.shapes is not None else [meta.shape]
    dtypes = meta.dtypes if meta.dtypes is not None else [meta.dtype]
    if any(dtype is None for dtype in dtypes):
        raise UnknownLayoutError(f"an object of {model} has no type")
    return Layout.of(model, shapes, dtypes, form)
