"""What determines the namespace of an LMCache object, in addition to its key: model, shapes, types and length."""

import importlib.metadata
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvdepot.errors import ConfigError

OBJECT_FORMAT = 1
"""Incremented when the stored form of an object, or the hash of its key, changes."""
OBJECT_BYTES_MAX = 1 << 30
"""Maximum size of a block."""

UNTOLD_DTYPE = "uint8"
"""The type of plain bytes. vLLM uses it for KV of every 8-bit format: ``fp8_e4m3`` as well as ``fp8_e5m2``."""


class UnknownLayoutError(ValueError):
    """The object cannot be identified completely, so it is neither stored nor looked up."""


@dataclass(frozen=True)
class Layout:
    """Layout shared by all objects of a namespace.

    Attributes:
        model: the model's name, as LMCache spells it.
        shapes: shape of each tensor in the object; the tensors are contiguous.
        dtypes: type of each tensor, such as ``bfloat16``.
        form: LMCache's name for the order of a tensor's dimensions; empty if LMCache does not report it.
        size_bytes: bytes of the object.
    """

    model: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    form: str
    size_bytes: int

    @classmethod
    def of(cls, model: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any], form: str = "") -> "Layout":
        """Returns the layout of an object with these tensors; ``dtypes`` are torch's.

        Raises:
            UnknownLayoutError: something is missing, or the object is empty or too large.
        """
        if not model:
            raise UnknownLayoutError("LMCache does not report the model's name")
        if not shapes or len(shapes) != len(dtypes):
            raise UnknownLayoutError(f"LMCache reports {len(shapes)} shapes and {len(dtypes)} types of {model}")
        sizes = [math.prod(shape) * int(dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=True)]
        if not 0 < sum(sizes) <= OBJECT_BYTES_MAX or min(sizes) <= 0:
            raise UnknownLayoutError(
                f"an object of {model} has tensors of {sizes} bytes: none may be empty, all together have at most 1 GiB"
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
    """Returns everything that changes an object's bytes and that neither its hash nor its length reflects (P8).

    This includes LMCache's version, because two versions may put different bytes into an object.

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
    """Rejects KV in plain bytes without a declared format: another format would have the same namespace.

    Raises:
        ConfigError: ``weights_version`` is missing.
    """
    if UNTOLD_DTYPE in dtypes and not weights_version:
        raise ConfigError(
            f"weights_version: missing, but KV has the type {UNTOLD_DTYPE}, which may be fp8_e4m3 or fp8_e5m2: set "
            "weights_version to a name that contains the format, such as v1-fp8_e4m3"
        )


def dtype_name(dtype: Any) -> str:
    """Returns the name of a torch type without its prefix."""
    return str(dtype).removeprefix("torch.")


def lmcache_version() -> str:
    """Returns the version of the installed LMCache.

    Raises:
        ConfigError: LMCache has no metadata.
    """
    try:
        return importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            "LMCache's version is unknown, so its objects cannot be identified: install its wheel"
        ) from error
