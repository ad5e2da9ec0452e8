"""Stores the blocks of an export in a depot."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, islice

import numpy as np

from kvdepot import _native
from kvdepot.errors import CorruptError, DepotTimeoutError
from kvdepot.stored.export import ExportedBlock, ExportReader

BATCH_BYTES = 32 << 20
BATCH_BLOCKS_MAX = 256
LOOKUP_BLOCKS = 4096
ATTEMPTS = 4
STEP_MS = 500


@dataclass
class Restored:
    """Outcome of an import.

    Attributes:
        blocks: blocks in the export.
        had: blocks that the depot already had.
        stored: blocks that it was given and has now.
        failures: blocks that it did not take, by kind of failure.
        missing: blocks that it took but no longer has: evicted, because they did not fit.
    """

    blocks: int = 0
    had: int = 0
    stored: int = 0
    missing: int = 0
    failures: Counter[str] = field(default_factory=Counter)


def open_namespace(depot: _native.Depot, reader: ExportReader) -> _native.Namespace:
    """Opens the export's namespace.

    Raises:
        CorruptError: facts and layout result in another namespace than the export says.
    """
    opened = depot.open_namespace(_facts_json(reader), reader.header.layout_json())
    if opened.id != reader.header.root:
        raise CorruptError(f"the export says namespace {reader.header.root}, and its facts make {opened.id}")
    return opened


def _facts_json(reader: ExportReader) -> str:
    return json.dumps(reader.header.facts, ensure_ascii=False, allow_nan=False)


def known_blocks(store: _native.Store, reader: ExportReader, done: Callable[[int], object]) -> tuple[int, int]:
    """Returns the number of blocks in the export, and how many of them the depot has."""
    blocks = had = 0
    for batch in _batches(reader.blocks(), _batch_blocks(reader)):
        blocks += len(batch)
        had += int(np.count_nonzero(store.lookup([block.hash for block in batch])))
        done(sum(len(block.payload) for block in batch))
    return blocks, had


def restore(depot: _native.Depot, reader: ExportReader, *, timeout_s: float, done: Callable[[int], object]) -> Restored:
    """Stores every block that the depot does not have, and waits until all are written to its tiers.

    The caller has compared all checksums (``ExportReader.check``); each block's is compared once more.

    Args:
        depot: an attached depot.
        reader: the export.
        timeout_s: how long the depot may go without taking a block, and without writing one at the end.
        done: called with the bytes of each batch.

    Raises:
        CorruptError: the file has changed since it was checked; blocks before the change are stored, and complete.
        DepotTimeoutError: the tiers were not written in time.
    """
    header = reader.header
    pages = _batch_blocks(reader)
    memory = np.zeros((pages, header.block_bytes), dtype=np.uint8)
    store = depot.store(open_namespace(depot, reader), timeout_ms=int(timeout_s * 1000))
    sizes = np.array(header.shard_bytes, dtype=np.uint64)
    offsets = np.array([0, *accumulate(header.shard_bytes)][:-1], dtype=np.uint64)
    strides = np.full(len(sizes), header.block_bytes, dtype=np.int64)
    store.register_pages(offsets + np.uint64(memory.ctypes.data), strides, pages, keep=memory, sizes=sizes)
    result, names = Restored(), []
    try:
        for batch in _batches(reader.blocks(), pages):
            result.blocks += len(batch)
            there = store.lookup([block.hash for block in batch])
            wanted = [block for block, has in zip(batch, there, strict=True) if not has]
            result.had += len(batch) - len(wanted)
            for page, block in enumerate(wanted):
                memory[page] = np.frombuffer(block.payload, dtype=np.uint8)
            names += _dump(depot, store, [block.hash for block in wanted], timeout_s, result)
            done(sum(len(block.payload) for block in batch))
        _drain(depot, timeout_s)
        for first in range(0, len(names), LOOKUP_BLOCKS):
            result.stored += int(np.count_nonzero(store.lookup(names[first : first + LOOKUP_BLOCKS])))
        result.missing = len(names) - result.stored
    finally:
        store.close(STEP_MS)
    return result


def _dump(
    depot: _native.Depot, store: _native.Store, names: list[bytes], timeout_s: float, result: Restored
) -> list[bytes]:
    """Returns the hashes that were stored, and counts the others. Waits for a full pool to write its blocks."""
    left = np.arange(len(names), dtype=np.int64)
    for attempt in range(ATTEMPTS):
        if not len(left):
            break
        task = store.dump_pages([names[index] for index in left], left)
        task.wait(int(timeout_s * 1000))
        failed = task.failed() if task.done() else np.arange(len(left))
        failures = task.failures() if task.done() else {"timeout": len(left)}
        left = left[failed]
        if not len(left):
            break
        if attempt == ATTEMPTS - 1 or set(failures) - {"no_space", "busy"}:
            result.failures.update(failures)
            break
        _drain(depot, timeout_s)
    lost = set(left.tolist())
    return [name for index, name in enumerate(names) if index not in lost]


def _drain(depot: _native.Depot, timeout_s: float) -> None:
    """Waits until everything dumped so far is written, as long as the depot makes progress."""
    least, since = None, time.monotonic()
    while not depot.drain(STEP_MS):
        stats = json.loads(depot.stats_json()).get("depot") or {}
        dirty, now = stats.get("dirty_blocks", 0), time.monotonic()
        if least is None or dirty < least:
            least, since = dirty, now
        elif now - since > timeout_s:
            raise DepotTimeoutError(f"{dirty} blocks were not written within {timeout_s:g} s: is a tier full or slow?")


def _batch_blocks(reader: ExportReader) -> int:
    return min(BATCH_BLOCKS_MAX, max(1, BATCH_BYTES // reader.header.block_bytes))


def _batches(blocks: Iterator[ExportedBlock], most: int) -> Iterator[list[ExportedBlock]]:
    while batch := list(islice(blocks, most)):
        yield batch
