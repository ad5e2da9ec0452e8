"""A program that uses a store over tensors or addresses on a device: what it may leave to the store.

A program of its own, as ``flow.py`` is. There is no torch here: a stand-in for it has what the store uses of it.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
from driver import Device

import kvdepot

TENSOR_BYTES = 64 << 10
WAIT_MS = 20_000


@dataclass
class Tensor:
    """A tensor in a device's memory, as far as the store looks at it."""

    address: int
    size_bytes: int
    device: str

    def data_ptr(self) -> int:
        return self.address

    def is_contiguous(self) -> bool:
        return True

    def numel(self) -> int:
        return self.size_bytes

    def element_size(self) -> int:
        return 1

    def untyped_storage(self) -> None:
        return None


class Event:
    """An event on the stream of an engine; see ``torch.cuda.Event``."""

    cuda_event: int

    def record(self, stream: Device) -> None:
        self.cuda_event = stream.record()


def pretend_torch(devices: dict[int, Device]) -> None:
    """Makes ``import torch`` find one whose current streams are those of these devices."""
    torch = ModuleType("torch")
    cast("Any", torch).cuda = SimpleNamespace(Event=Event, current_stream=devices.__getitem__)
    sys.modules["torch"] = torch


def open_depot(engine: str) -> kvdepot.Depot:
    """Returns a depot of this process."""
    config = {"mode": "embedded", "pipeline": "Cache", "pool_gb": 0.01, "timeout_ms": WAIT_MS, "log_level": "error"}
    return kvdepot.attach({**config, "copy_engine": engine})


def after_kernels(device: Device, engine: str, ordered: str) -> str:
    """Stores and loads behind kernels that have only been launched. Returns what went wrong, or nothing."""
    source, target = device.allocate(TENSOR_BYTES), device.allocate(TENSOR_BYTES)
    place = f"cuda:{device.ordinal}"

    def arguments(address: int) -> dict[str, Any]:
        if ordered == "tensors":
            return {"buffers": [[Tensor(address, TENSOR_BYTES, place)]]}
        event = device.record() if ordered == "event" else 0
        return {"buffers": np.array([[address]], dtype=np.uint64), "wait_event": event}

    with open_depot(engine) as depot:
        layout = kvdepot.BlockLayout(1, [TENSOR_BYTES])
        store = depot.open(layout=layout, namespace={"ordinal": device.ordinal}, cuda_device=device.ordinal)
        device.write(source, np.full(TENSOR_BYTES, 7, dtype=np.uint8))
        if not store.dump([b"a"], **arguments(source)).wait(WAIT_MS).ok:
            return "the dump failed"
        # torch.zeros: the caller never sees when its kernel runs.
        device.write(target, np.zeros(TENSOR_BYTES, dtype=np.uint8))
        if not store.load([b"a"], **arguments(target)).wait(WAIT_MS).ok:
            return "the load failed"
        found = device.read(target, TENSOR_BYTES)
        device.synchronize()
        store.close()
    return device.violations() or ("" if (found == 7).all() else "other bytes than those stored")


def touching(device: Device, engine: str, blocks: bool) -> str:
    """Stores and loads two allocations at touching addresses: of one block, or of two. Returns what went wrong."""
    both = device.allocate_touching(TENSOR_BYTES, TENSOR_BYTES)
    assert both[0] + TENSOR_BYTES == both[1]
    kept = np.random.default_rng(device.ordinal).integers(0, 256, (2, TENSOR_BYTES), dtype=np.uint8)
    with open_depot(engine) as depot:
        layout = kvdepot.BlockLayout(1, [TENSOR_BYTES] if blocks else [TENSOR_BYTES, TENSOR_BYTES])
        store = depot.open(layout=layout, namespace={"a": 1}, cuda_device=device.ordinal)
        hashes = [b"a", b"b"] if blocks else [b"a"]
        rows = np.array(both, dtype=np.uint64).reshape(len(hashes), -1)
        for address, data in zip(both, kept, strict=True):
            device.write(address, data)
        if failures := store.dump(hashes, rows, wait_event=device.record()).wait(WAIT_MS).failures:
            return f"the dump failed: {failures}"
        for address in both:
            device.write(address, np.zeros(TENSOR_BYTES, dtype=np.uint8))
        if failures := store.load(hashes, rows, wait_event=device.record()).wait(WAIT_MS).failures:
            return f"the load failed: {failures}"
        found = [device.read(address, TENSOR_BYTES) for address in both]
        device.synchronize()
        store.close()
    return device.violations() or ("" if (np.array(found) == kept).all() else "other bytes than those stored")


def main() -> None:
    """Runs schedules; prints failures by seed as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("what", choices=("tensors", "event", "nothing", "block", "blocks"))
    parser.add_argument("--engine", default="memcpy")
    parser.add_argument("--schedules", type=int, default=1)
    arguments = parser.parse_args()
    devices: dict[int, Device] = {}
    pretend_torch(devices)
    wrong = {}
    for seed in range(arguments.schedules):
        device = devices[seed] = Device(arguments.library, seed, seed)
        if arguments.what in ("block", "blocks"):
            problem = touching(device, arguments.engine, arguments.what == "blocks")
        else:
            problem = after_kernels(device, arguments.engine, arguments.what)
        if problem:
            wrong[seed] = problem
    print(json.dumps(wrong))
    sys.stdout.flush()
    # Modules are torn down in an order that a driver's threads cannot rely on.
    os._exit(0)


if __name__ == "__main__":
    main()
