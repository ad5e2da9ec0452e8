"""Memory of a device: the stand-in's for CUDA, whose copies are late and in a random legal order."""

import ctypes
import importlib.util
from dataclasses import replace
from pathlib import Path

import torch

from kvdepot.engines.vllm.pages import GroupPages, Run

DEVICE_OFFSET = 0x2000_0000_0000_0000
"""How far the stand-in's device addresses are above the process's own memory under them (its ``memory.rs``)."""

DRIVER = Path(__file__).resolve().parents[1] / "device" / "driver.py"


def standin_is_there() -> bool:
    """Whether this process finds the stand-in where it looks for a CUDA driver."""
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
        """Device memory as a tensor that this process can read and write, too."""
        self._allocated.append(self.device.allocate(size))
        under = (ctypes.c_int8 * size).from_address(self._allocated[-1] - DEVICE_OFFSET)
        return torch.frombuffer(under, dtype=torch.int8).zero_()

    def free(self) -> None:
        """Gives back all that was taken; nothing may use it any more."""
        for address in self._allocated:
            self.device._call_relaxed("cuMemFree_v2", ctypes.c_uint64(address))
        self._allocated.clear()

    def on_device(self, pages: GroupPages) -> GroupPages:
        """The same pages by the device's addresses."""
        shards = tuple(
            tuple(Run(run.base + DEVICE_OFFSET, run.stride, run.size) for run in shard) for shard in pages.shards
        )
        return replace(pages, shards=shards, cuda_device=self.ordinal)
