"""Dumps KV blocks into a depot and loads them back: from memory, then from disk after a restart. Needs no GPU.

Every block is compared byte for byte. The times are of this machine, this minute; memcpy is measured beside them.
"""

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import kvdepot

MIB = 1 << 20
LAYERS = 32
DRAIN_MS = 60_000
DRAIN = "wait for the rest of the write-behind"

Pages = npt.NDArray[np.uint8]


def timed(work: Callable[[], object]) -> float:
    """Returns the seconds that ``work`` takes."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def chained_hashes(count: int) -> list[bytes]:
    """Returns block hashes as an engine computes them: each covers all tokens up to its block's end."""
    hashes, last = [], b""
    for index in range(count):
        last = hashlib.sha256(last + index.to_bytes(8, "little")).digest()
        hashes.append(last)
    return hashes


def rows(pages: Pages) -> list[list[Pages]]:
    """Returns one row per block, with one array per layer."""
    return [list(block) for block in pages]


def run(count: int, layer_bytes: int, directory: str) -> list[tuple[str, float]]:
    """Dumps, loads, restarts and loads again. Returns the steps and their seconds."""
    generator = np.random.default_rng(0)
    pages = generator.integers(0, 256, size=(count, LAYERS, layer_bytes), dtype=np.uint8)
    loaded = np.zeros_like(pages)
    hashes = chained_hashes(count)
    config = {"directories": [directory], "pool_gb": max(0.25, 2 * pages.nbytes / (1 << 30)), "log_level": "warn"}
    layout = kvdepot.BlockLayout(shards=LAYERS, tensor_sizes_bytes=[layer_bytes])
    namespace = {"model": "demo", "dtype": "uint8"}
    times = [("memcpy of the same bytes", timed(lambda: np.copyto(loaded, pages)))]

    with kvdepot.open(config, layout=layout, namespace=namespace) as store:
        if store.lookup_on_prefix(hashes) != 0:
            raise SystemExit("the depot is not empty: give another --directory")
        times.append(("dump to memory", timed(lambda: store.dump(hashes, rows(pages)).wait().raise_for_failures())))
        loaded[:] = 0
        times.append(("load from memory", timed(lambda: store.load(hashes, rows(loaded)).wait().raise_for_failures())))
        np.testing.assert_array_equal(loaded, pages)
        times.append((DRAIN, timed(lambda: store.drain(DRAIN_MS))))

    with kvdepot.open(config, layout=layout, namespace=namespace) as store:
        loaded[:] = 0
        times.append(
            (
                "load from disk after a restart",
                timed(lambda: store.load(hashes, rows(loaded)).wait().raise_for_failures()),
            )
        )
        np.testing.assert_array_equal(loaded, pages)
    return times


def main() -> None:
    """Parses the command line, runs, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=128, help="default 128")
    parser.add_argument("--layer-kib", type=int, default=64, help=f"KiB of each of {LAYERS} layers, default 64")
    parser.add_argument("--directory", help="where block files go; a temporary directory when left out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvdepot-example-") as scratch:
        times = run(arguments.blocks, arguments.layer_kib << 10, arguments.directory or scratch)
    size_mib = arguments.blocks * LAYERS * (arguments.layer_kib << 10) / MIB
    table = Table("step", "ms", "GB/s", title=f"{arguments.blocks} blocks, {size_mib:.0f} MiB, every byte compared")
    for name, seconds in times:
        rate = "" if name == DRAIN else f"{size_mib * MIB / seconds / 1e9:.2f}"
        table.add_row(name, f"{seconds * 1e3:.1f}", rate)
    Console().print(table)


if __name__ == "__main__":
    main()
