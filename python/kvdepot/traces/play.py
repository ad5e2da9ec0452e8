"""Sends a trace as load to a depot: each request looks up, loads its hit, and dumps the rest."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvdepot.errors import KVDepotError
from kvdepot.store import Store
from kvdepot.traces.files import Request

CHUNK_BLOCKS = 128
"""Number of blocks in one of a client's tasks."""
WORD = 8


@dataclass
class Played:
    """Outcome of a replay.

    Attributes:
        blocks: blocks that requests named.
        hits: blocks of these that were loaded.
        wrong: loaded blocks with other bytes than were dumped; must always be 0 (P1).
        failed: blocks that the depot failed to store or load.
        errors: requests that ended with an error.
        lookup_s, load_s, dump_s: durations for each request that looked up, loaded or dumped.
        late_s: delay of each request against the trace's time; empty in a closed loop.
        seconds: from the first request to the end of the last.
    """

    requests: int = 0
    blocks: int = 0
    hits: int = 0
    wrong: int = 0
    failed: int = 0
    errors: int = 0
    lookup_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    dump_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: "Played") -> None:
        """Adds another client's counts."""
        for name in ("requests", "blocks", "hits", "wrong", "failed", "errors"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("lookup_s", "load_s", "dump_s", "late_s"):
            getattr(self, name).extend(getattr(other, name))

    def json(self, block_bytes: int) -> dict[str, object]:
        """Returns the outcome as an object for JSON and tables."""
        moved = {"loaded": self.hits, "dumped": self.blocks - self.hits}
        return {
            "requests": self.requests,
            "blocks": self.blocks,
            "hit": round(self.hits / max(1, self.blocks), 4),
            "wrong_blocks": self.wrong,
            "failed_blocks": self.failed,
            "errors": self.errors,
            "seconds": round(self.seconds, 3),
            **{f"{name}_gb": round(count * block_bytes / 1e9, 3) for name, count in moved.items()},
            **_milliseconds("lookup", self.lookup_s),
            **_milliseconds("load", self.load_s),
            **_milliseconds("dump", self.dump_s),
            **_milliseconds("late", self.late_s),
        }


def _milliseconds(name: str, seconds: list[float]) -> dict[str, object]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    parts = {"p50": 0.5, "p99": 0.99}
    return {
        f"{name}_{word}_ms": round(ordered[min(len(ordered) - 1, int(part * len(ordered)))] * 1000, 3)
        for word, part in parts.items()
    }


class Client:
    """Serves one request at a time from memory of its own. First and last word of each block identify the block."""

    def __init__(self, store: Store, block_bytes: int) -> None:
        self.played = Played()
        self._store = store
        self._memory = np.zeros((CHUNK_BLOCKS, block_bytes), np.uint8)
        self._words = self._memory[:, :WORD].view(np.uint64)[:, 0]
        self._last_words = self._memory[:, -WORD:].view(np.uint64)[:, 0]
        base = self._memory.ctypes.data
        self._addresses: npt.NDArray[np.uint64] = (
            base + block_bytes * np.arange(CHUNK_BLOCKS, dtype=np.uint64)
        ).reshape(-1, 1)

    def serve(self, blocks: Sequence[int]) -> None:
        """Serves one request, from its lookup to the end of its dump."""
        played = self.played
        played.requests += 1
        played.blocks += len(blocks)
        try:
            names = [(block + 1).to_bytes(16, "little") for block in blocks]
            begun = time.perf_counter()
            found = self._store.lookup_on_prefix(names)
            looked = time.perf_counter()
            played.lookup_s.append(looked - begun)
            hits = self._load(blocks[:found], names[:found])
            loaded = time.perf_counter()
            self._dump(blocks[hits:], names[hits:])
            played.hits += hits
            if found:
                played.load_s.append(loaded - looked)
            if hits < len(blocks):
                played.dump_s.append(time.perf_counter() - loaded)
        except KVDepotError:
            played.errors += 1

    def _load(self, blocks: Sequence[int], names: list[bytes]) -> int:
        """Loads blocks up to the first one that fails. Returns the number loaded."""
        for at in range(0, len(blocks), CHUNK_BLOCKS):
            chunk = np.array(blocks[at : at + CHUNK_BLOCKS], np.uint64)
            count = len(chunk)
            failed = self._store.load(names[at : at + count], self._addresses[:count]).wait().failed
            good = int(failed[0]) if len(failed) else count
            right = (self._words[:good] == chunk[:good]) & (self._last_words[:good] == chunk[:good])
            self.played.wrong += int(good - right.sum())
            if good < count:
                self.played.failed += len(failed)
                return at + good
        return len(blocks)

    def _dump(self, blocks: Sequence[int], names: list[bytes]) -> None:
        for at in range(0, len(blocks), CHUNK_BLOCKS):
            chunk = np.array(blocks[at : at + CHUNK_BLOCKS], np.uint64)
            count = len(chunk)
            self._words[:count] = self._last_words[:count] = chunk
            self.played.failed += len(self._store.dump(names[at : at + count], self._addresses[:count]).wait().failed)


def play(
    store: Store,
    requests: Sequence[Request],
    *,
    block_bytes: int,
    clients: int,
    speed: float | None,
    served: Callable[[int], object] = lambda _: None,
) -> Played:
    """Sends requests with ``clients`` clients: in a closed loop, or ``speed`` times as fast as in the trace.

    A request that is due while all clients are busy is served late, and its delay is recorded. ``served`` is called
    with numbers of served requests, by any thread.
    """
    due: queue.SimpleQueue[tuple[float, Sequence[int]] | None] = queue.SimpleQueue()
    workers = [Client(store, block_bytes) for _ in range(clients)]
    begun = time.perf_counter()

    def work(client: Client) -> None:
        while (item := due.get()) is not None:
            when_s, blocks = item
            if speed is not None:
                client.played.late_s.append(max(0.0, time.perf_counter() - begun - when_s))
            client.serve(blocks)
            served(1)

    threads = [threading.Thread(target=work, args=(client,), daemon=True) for client in workers]
    for thread in threads:
        thread.start()
    first_ms = requests[0][0] if requests else 0
    for timestamp, _, _, blocks in requests:
        when_s = 0.0
        if speed is not None:
            when_s = (timestamp - first_ms) / 1000 / speed
            time.sleep(max(0.0, when_s - (time.perf_counter() - begun)))
        due.put((when_s, blocks))
    for _ in threads:
        due.put(None)
    for thread in threads:
        thread.join()
    total = Played(seconds=time.perf_counter() - begun)
    for client in workers:
        total.add(client.played)
    return total
