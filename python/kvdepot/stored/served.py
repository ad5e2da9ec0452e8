"""A namespace's blocks as a running depot lists and serves them: those of pools and of tiers without directories."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvdepot import _native
from kvdepot.errors import DepotTimeoutError, StorageError
from kvdepot.stored.export import ExportedBlock, ExportWriter
from kvdepot.stored.namespaces import StoredNamespace
from kvdepot.stored.unload import Exported, export_header, new_export

LIST_S = 60.0
TAKE_BLOCKS = 65_536
PAUSE_S = 0.01
BATCH_BYTES = 32 << 20
BATCH_BLOCKS_MAX = 256
GONE = "not_found"
POOL = "pool"


def list_blocks(depot: _native.Depot, namespace: _native.Namespace) -> Mapping[str, Sequence[bytes]]:
    """Returns the hashes of the namespace's blocks by place: ``pool``, or the name of a tier.

    Slab and Dax tiers list everything. Of a pool server or bucket, the depot lists what it has recently stored or found
    there; other blocks are unknown to it.

    Raises:
        DepotTimeoutError: the depot tells nothing for a minute. StorageError: there are too many blocks.
    """
    found: dict[str, dict[bytes, None]] = {}
    follower = depot.follow([[namespace]])
    try:
        since = time.monotonic()
        while True:
            is_all = follower.in_step
            changes = follower.take(TAKE_BLOCKS)
            for _, place, stored, hashes in changes:
                listed = found.setdefault(follower.places[place], {})
                if stored:
                    listed.update(dict.fromkeys(hashes))
                else:
                    for one in hashes:
                        listed.pop(one, None)
            if changes:
                since = time.monotonic()
            elif is_all:
                break
            elif time.monotonic() - since > LIST_S:
                raise DepotTimeoutError(f"the depot has not listed the blocks of {namespace.id} within {LIST_S:g} s")
            else:
                time.sleep(PAUSE_S)
        if dict(follower.counters())["left_out"]:
            raise StorageError(f"namespace {namespace.id} has more blocks than one process can list")
    finally:
        follower.close()
    return {place: list(hashes) for place, hashes in found.items()}


def export_served(
    store: _native.Store,
    described: StoredNamespace,
    hashes: Sequence[bytes],
    path: Path,
    *,
    epoch_now: Callable[[], int | None],
    done: Callable[[int], object],
) -> Exported:
    """Writes blocks that a depot serves to a new file. Each passes through the depot's pool.

    The file gets its name only when it is complete. The depot does not tell when blocks were used: the export has the
    time of now for all of them.

    Args:
        store: a store of the namespace, which is closed afterwards. Its time limit is that of each batch of blocks.
        described: the namespace.
        hashes: hashes of the blocks.
        path: path of the file; an existing file is replaced.
        epoch_now: returns the namespace's epoch, or ``None`` if the depot does not know the namespace any more.
        done: called with the bytes of each batch.

    Raises:
        StorageError: the file cannot be written, or the namespace was reset in the meantime; then there is no new file.
    """
    sizes, block_bytes = described.shard_bytes, sum(described.shard_bytes)
    pages = min(BATCH_BLOCKS_MAX, max(1, BATCH_BYTES // block_bytes))
    memory = np.zeros((pages, block_bytes), dtype=np.uint8)
    offsets = np.array([0, *accumulate(sizes)][:-1], dtype=np.uint64)
    strides = np.full(len(sizes), block_bytes, dtype=np.int64)
    bases = offsets + np.uint64(memory.ctypes.data)
    store.register_pages(bases, strides, pages, keep=memory, sizes=np.array(sizes, dtype=np.uint64))
    failures: Counter[str] = Counter()
    try:
        with new_export(path, export_header(described), lambda: epoch_now() == described.epoch) as export:
            for first in range(0, len(hashes), pages):
                batch = hashes[first : first + pages]
                failures.update(_write(store, export, batch, memory))
                done(len(batch) * block_bytes)
    finally:
        store.close()
    gone = failures.pop(GONE, 0)
    trouble = ", ".join(f"{count} {kind}" for kind, count in sorted(failures.items()))
    written = len(hashes) - gone - sum(failures.values())
    return Exported(written, written * block_bytes, 0, gone, sum(failures.values()), trouble)


def _write(
    store: _native.Store,
    export: ExportWriter,
    batch: Sequence[bytes],
    memory: npt.NDArray[np.uint8],
) -> Mapping[str, int]:
    """Adds those of the blocks that the depot serves, and returns the others by kind of failure."""
    task = store.load_pages(batch, np.arange(len(batch), dtype=np.int64))
    task.wait()  # it ends at the store's time limit
    failed = set(task.failed().tolist())
    now = int(time.time())
    for page, one in enumerate(batch):
        if page not in failed:
            export.add(ExportedBlock(one, now, memory[page].tobytes()))
    return task.failures()
