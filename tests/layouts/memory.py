"""Memory of a device: that of the stand-in for CUDA, whose copies are delayed and in a random legal order."""

import ctypes
import importlib.util
from dataclasses import replace
from pathlib import Path

import torch

from kvdepot.engines.vllm.pages import GroupPages, Run

DEVICE_OFFSET = 0x2000_0000_0000_0000
"""Offset of the stand-in's device addresses from the process memory that backs them (its ``memory.rs``)."""

DRIVER = Path(__file__).resolve().parents[1] / "device" / "driver.py"


def standin_is_there() -> bool:
    """Returns whether this process finds the stand-in when it looks for a CUDA driver."""
    try:
        return hasattr(ctypes.CDLL("libcuda.so.1"), "standin_reset")
    except OSError:
        return False


class Standin:
    """A device of the stand-in, and tensors over its memory."""

    def __init__(self, ordinal: int, seed: int) -> None:
        spec = importlib.util.spec_from_file_location("driver", DRIVER)
        assert spec is not None
        assert spec.loader is not None
        driver = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(driver)
        self.device = driver.Device(Path("libcuda.so.1"), ordinal, seed)
        self.ordinal = ordinal
        self._allocated: list[int] = []

    def zeros(self, size: int) -> torch.Tensor:
        """Returns device memory as a tensor that this process can also read and write."""
        self._allocated.append(self.device.allocate(size))
        under = (ctypes.c_int8 * size).from_address(self._allocated[-1] - DEVICE_OFFSET)
        return torch.frombuffer(under, dtype=torch.int8).zero_()

    def free(self) -> None:
        """Frees all allocations; nothing may use them any more."""
        for address in self._allocated:
            self.device._call_relaxed("cuMemFree_v2", ctypes.c_uint64(address))
        self._allocated.clear()

    def on_device(self, pages: GroupPages) -> GroupPages:
        """Returns the same pages by the device's addresses."""
        shards = tuple(
            tuple(Run(run.base + DEVICE_OFFSET, run.stride, run.size) for run in shard) for shard in pages.shards
        )
        return replace(pages, shards=shards, cuda_device=self.ordinal)
