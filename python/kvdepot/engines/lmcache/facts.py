"""What an object of LMCache is, beyond its key: model, shapes, types and length, from which its namespace follows."""

import importlib.metadata
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvdepot.errors import config_error

OBJECT_FORMAT = 1
"""Raised when what we store of an object, or how its key becomes a hash, changes."""
OBJECT_BYTES_MAX = 1 << 30
"""A block has at most so many bytes."""

UNTOLD_DTYPE = "uint8"
"""The type of plain bytes. vLLM has KV of every 8-bit format in it, ``fp8_e4m3`` as well as ``fp8_e5m2``."""


class UnknownLayoutError(ValueError):
    """The object cannot be named fully, so it is neither stored nor looked up."""


@dataclass(frozen=True)
class Layout:
    """What all objects of a namespace have in common.

    Attributes:
        model: the model's name, as LMCache has it.
        shapes: shape of each tensor in the object, which lie one after another.
        dtypes: type of each tensor, such as ``bfloat16``.
        form: LMCache's name of the order of a tensor's dimensions; empty where LMCache does not tell it.
        size_bytes: bytes of the object.
    """

    model: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    form: str
    size_bytes: int

    @classmethod
    def of(cls, model: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any], form: str = "") -> "Layout":
        """The layout of an object with these tensors; ``dtypes`` are torch's.

        Raises:
            UnknownLayoutError: something is missing, or the object is empty or too large.
        """
        if not model:
            raise UnknownLayoutError("LMCache does not tell the model's name")
        if not shapes or len(shapes) != len(dtypes):
            raise UnknownLayoutError(f"LMCache tells {len(shapes)} shapes and {len(dtypes)} types of {model}")
        sizes = [math.prod(shape) * int(dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=True)]
        if not 0 < sum(sizes) <= OBJECT_BYTES_MAX or min(sizes) <= 0:
            raise UnknownLayoutError(
                f"an object of {model} has tensors of {sizes} bytes: each must have some, all 1 GiB at most"
            )
        return cls(
            model,
            tuple(tuple(int(size) for size in shape) for shape in shapes),
            tuple(dtype_name(dtype) for dtype in dtypes),
            form,
            sum(sizes),
        )


def namespace_facts(
    layout: Layout, face: str, weights_version: str, further: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Everything that changes an object's bytes and is neither in its hash nor in its length (P8).

    LMCache's version is among them: nothing promises that two versions put the same bytes into an object.

    Raises:
        ConfigError: the type is that of plain bytes, and no ``weights_version`` says what they are.
    """
    refuse_untold(layout.dtypes, weights_version)
    return {
        "engine": "lmcache",
        "face": face,
        "format": OBJECT_FORMAT,
        "lmcache": lmcache_version(),
        "model": layout.model,
        "weights_version": weights_version,
        "shapes": [list(shape) for shape in layout.shapes],
        "dtypes": list(layout.dtypes),
        "form": layout.form,
        **(further or {}),
    }


def refuse_untold(dtypes: Iterable[str], weights_version: str) -> None:
    """Refuses KV in plain bytes whose format nobody has declared: another format would be the same namespace.

    Raises:
        ConfigError: ``weights_version`` is missing.
    """
    if UNTOLD_DTYPE in dtypes and not weights_version:
        raise config_error(
            f"weights_version: missing, and KV has the type {UNTOLD_DTYPE}, which does not tell fp8_e4m3 from fp8_e5m2:"
            " set weights_version to a name with the format, such as v1-fp8_e4m3"
        )


def dtype_name(dtype: Any) -> str:
    """A type of torch's without its prefix."""
    return str(dtype).removeprefix("torch.")


def lmcache_version() -> str:
    """The version of the LMCache that is installed.

    Raises:
        ConfigError: LMCache has no metadata.
    """
    try:
        return importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError as error:
        raise config_error("LMCache's version is unknown, so its objects cannot be named: install its wheel") from error
