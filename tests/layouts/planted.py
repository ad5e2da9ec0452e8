"""Modules that a CPU wheel of vLLM lacks, planted so that the classes of GPU backends can be imported.

They contain only names: a backend's requirements of its cache (block sizes, layouts, bytes of a token) are its own
Python, and no kernel is called.
"""

import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

MODULES = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")


class _Planted(ModuleType):
    """Has any name that is imported from it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {})
        setattr(self, name, value)
        return value


def plant() -> None:
    """Plants missing modules; real ones stay."""
    for name in MODULES:
        if name not in sys.modules:
            module = _Planted(name)
            module.__path__ = []  # type: ignore[attr-defined]
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = module


def plant_kernels() -> None:
    """Gives modules of backends the kernels that they import, and host memory in place of device memory."""
    import importlib

    import torch
    from vllm.v1.attention.backends import fa_utils

    for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):
        if not hasattr(fa_utils, name):
            setattr(fa_utils, name, lambda *args, **kwargs: None)
    empty = torch.empty
    with mock.patch.object(torch, "empty", lambda *size, device=None, **kwargs: empty(1, **kwargs)):
        importlib.import_module("vllm.v1.attention.backends.mla.cutlass_mla")


@contextmanager
def device(major: int, minor: int = 0) -> Iterator[None]:
    """Within the context, vLLM's platform reports the compute capability ``major.minor``, by which backends decide."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    capability = classmethod(lambda cls, device_id=0: DeviceCapability(major, minor))
    with mock.patch.object(type(current_platform), "get_device_capability", capability):
        yield
