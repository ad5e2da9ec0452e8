"""What vLLM does with a store on a device: layers are computed, saved behind events, loaded before later kernels.

A program of its own, because a process finds its driver once: ``LD_LIBRARY_PATH`` says which.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
from driver import Device

import kvdepot

LAYERS, PAGES, BLOCKS = 3, 10, 4
PAGE_BYTES = (4096, 1536)
"""Bytes of a page in each tensor of a layer: separate keys and values, one of them no multiple of anything large."""
POOL_GB = 1 / 256
WAIT_MS = 20_000


class Engine:
    """Layers of KV cache on a device, and a store over them."""

    def __init__(
        self, library: Path, ordinal: int, seed: int, copy_engine: str, layerwise: bool, timeout_ms: int = WAIT_MS
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.device = Device(library, ordinal, seed)
        self.layerwise = layerwise
        self.tensors = [[self.device.allocate(PAGES * size) for size in PAGE_BYTES] for _ in range(LAYERS)]
        for layer in self.tensors:
            for address, size in zip(layer, PAGE_BYTES, strict=True):
                self.device.write(address, np.full(PAGES * size, 0xAA, dtype=np.uint8))
        self.device.synchronize()
        config = {"mode": "embedded", "pipeline": "Cache", "pool_gb": POOL_GB, "timeout_ms": WAIT_MS}
        self.depot = kvdepot.attach({**config, "copy_engine": copy_engine, "log_level": "warn"})
        sizes = list(PAGE_BYTES)
        layout = kvdepot.BlockLayout(LAYERS, sizes) if layerwise else kvdepot.BlockLayout(1, sizes * LAYERS)
        self.store = self.depot.open(
            layout=layout, namespace={"seed": seed}, cuda_device=ordinal, timeout_ms=timeout_ms
        )
        bases = np.array([base for layer in self.tensors for base in layer], dtype=np.uint64)
        self.store.register_pages(bases, np.array(sizes * LAYERS, dtype=np.int64), PAGES)

    def compute(self, layer: int, pages: list[int]) -> "Written":
        """Launches writes to a layer's pages. Returns their future content."""
        written = {}
        for page in pages:
            for tensor, size in enumerate(PAGE_BYTES):
                data = self.random.integers(0, 256, size, dtype=np.uint8)
                self.device.write(self.tensors[layer][tensor] + page * size, data)
                written[layer, page, tensor] = data.tobytes()
        return written

    def attend(self, layer: int, page: int, tensor: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
        """Launches a read of a layer's page."""
        size = PAGE_BYTES[tensor]
        return self.device.read(self.tensors[layer][tensor] + page * size, size)

    def close(self) -> None:
        self.store.close(0)
        self.depot.close()


Written = dict[tuple[int, int, int], bytes]
"""Content of pages: by layer, page and tensor."""


class FlowError(Exception):
    """Describes a failure."""


class Request:
    """One request that is computed and saved, and then found by another.

    ``without`` names a wait to leave out, as a bug in the connector would: ``save``, ``load``, ``layer`` or none.
    """

    def __init__(self, engine: Engine, without: str) -> None:
        self.engine, self.without = engine, without
        self.hashes = [bytes([index] * 16) for index in range(BLOCKS)]
        self.source = [int(page) for page in engine.random.permutation(PAGES)[:BLOCKS]]
        self.target = [page for page in range(PAGES) if page not in self.source][:BLOCKS]

    def point(self, name: str) -> int:
        """Returns an event after everything launched, unless it is the one to leave out."""
        return 0 if self.without == name else self.engine.device.record()

    def save(self) -> Written:
        """Computes and dumps; returns when the engine may reuse its memory."""
        engine, pages, written = self.engine, self.source, {}
        if engine.layerwise:
            dump = engine.store.begin_dump_pages(self.hashes, pages)
            for layer in range(LAYERS):
                written |= engine.compute(layer, self.source)
                dump.submit_shard(layer, wait_event=self.point("save"))
        else:
            for layer in range(LAYERS):
                written |= engine.compute(layer, self.source)
            dump = engine.store.dump_pages(self.hashes, pages, wait_event=self.point("save"))
        if not dump.wait(WAIT_MS).ok:
            raise FlowError(f"the dump failed: {dump.result().failures}")
        return written

    def load(self, written: Written) -> None:
        """Loads into other pages, and reads each layer as soon as it is in place."""
        engine = self.engine
        # The old pages are in use again, and a kernel of a finished request still writes to the new ones.
        for layer in range(LAYERS):
            engine.compute(layer, self.source + self.target)
        load = engine.store.load_pages(self.hashes, self.target, wait_event=self.point("load"))
        found = {}
        for layer in range(LAYERS):
            shard = layer if engine.layerwise else 0
            waits = self.without != "layer"
            if waits and not load.wait_shard_on(shard, stream=engine.device.compute, timeout_ms=WAIT_MS):
                raise FlowError(f"layer {layer} did not come in time")
            for index in range(BLOCKS):
                for tensor in range(len(PAGE_BYTES)):
                    found[layer, index, tensor] = engine.attend(layer, self.target[index], tensor)
        engine.device.synchronize()
        if not load.wait(WAIT_MS).ok:
            raise FlowError(f"the load failed: {load.result().failures}")
        for (layer, index, tensor), read in found.items():
            if read.tobytes() != written[layer, self.source[index], tensor]:
                raise FlowError(f"layer {layer}, block {index}, tensor {tensor}: other bytes were read than computed")


def problem_of(engine: Engine, without: str) -> str:
    """Returns what goes wrong with one request, or nothing."""
    request = Request(engine, without)
    try:
        request.load(request.save())
    except FlowError as error:
        return str(error)
    return engine.device.violations()


def main() -> int:
    """Runs schedules; prints failures by seed as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--layerwise", action="store_true")
    parser.add_argument("--without", default="", choices=("", "save", "load", "layer"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedules", type=int, default=1)
    arguments = parser.parse_args()
    wrong = {}
    for number in range(arguments.schedules):
        seed = arguments.seed + number
        engine = Engine(arguments.library, number, seed, arguments.engine, arguments.layerwise)
        if problem := problem_of(engine, arguments.without):
            wrong[seed] = problem
        engine.close()
    print(json.dumps(wrong))
    sys.stdout.flush()
    # Modules are torn down in an order that a driver's threads cannot rely on.
    os._exit(0)


if __name__ == "__main__":
    main()
