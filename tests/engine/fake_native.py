"""A stand-in for ``kvdepot._native`` in pure Python: the same interface over a directory of files.

For developing and testing connectors without the core. Processes share it through ``<socket>.fake/``, whose content
survives restarts. ``<socket>.fake/control.json`` injects failures: ``dead`` (nothing answers),
``fail_load_every`` (every n-th block fails), ``fail_rank`` (only where the namespace's facts have this kv_shard),
``load_delay_ms``, ``dump_delay_ms``, ``unsettled_polls`` (a claim is empty before that many). The environment variable
``KVDEPOT_FAKE_CORRUPT`` corrupts loaded bytes; ``KVDEPOT_FAKE_STRICT`` compares blocks that are dumped twice.
"""

import ctypes
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import numpy as np

__version__ = "0.0-fake"
PROTOCOL_VERSION = 0


class KVDepotError(Exception):
    kind = "error"


class ConfigError(KVDepotError, ValueError):
    kind = "config"


def _kind(name: str, kind: str, *bases: type) -> type:
    return type(name, (KVDepotError, *bases), {"kind": kind})


BlockNotFoundError = _kind("BlockNotFoundError", "not_found", KeyError)
BusyError = _kind("BusyError", "busy")
DepotTimeoutError = _kind("DepotTimeoutError", "timeout", TimeoutError)
ProtocolError = _kind("ProtocolError", "protocol")
StorageError = _kind("StorageError", "io", OSError)
CorruptError = type("CorruptError", (StorageError,), {"kind": "corrupt"})
NoSpaceError = type("NoSpaceError", (StorageError,), {"kind": "no_space"})
UnavailableError = _kind("UnavailableError", "unavailable", ConnectionError)
UnsupportedError = _kind("UnsupportedError", "unsupported")


def block_hash(engine_hash: bytes) -> bytes:
    """Sixteen bytes of it, in place of the core's reduction."""
    return engine_hash[:16].ljust(16, b"\0")


@functools.cache
def tier_table() -> str:
    """Returns the core's own table: it is data that the configuration is derived from."""
    file = next(Path(sys.modules["kvdepot"].__path__[0]).glob("_native*.so"))
    spec = importlib.util.spec_from_file_location("core._native", file)
    assert spec is not None
    assert spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    return core.tier_table()


def init_logging(level: str, path: str | None = None, **named: object) -> None:
    pass


class Namespace:
    def __init__(self, root: Path, canonical: str) -> None:
        self.canonical = canonical
        described = json.loads(canonical)
        # As the core does, whatever the order of the description.
        canonical = self.canonical = json.dumps(described, sort_keys=True)
        facts, layout = described["facts"], described["layout"]
        self.shard = int(facts.get("kv_shard", 0))
        self.sizes = [sizes for count, sizes in layout for _ in range(count)]
        self._base = root / hashlib.sha256(canonical.encode()).hexdigest()[:24]
        self._base.mkdir(parents=True, exist_ok=True)

    @property
    def epoch(self) -> int:
        try:
            return int((self._base / "epoch").read_text())
        except FileNotFoundError:
            return 0

    def next_epoch(self) -> None:
        number = self.epoch + 1
        (self._base / f"epoch.{os.getpid()}").write_text(str(number))
        os.rename(self._base / f"epoch.{os.getpid()}", self._base / "epoch")

    @property
    def id(self) -> str:
        return hashlib.sha256(f"{self.canonical}{self.epoch}".encode()).hexdigest()[:32]

    def file(self, block_hash: bytes) -> Path:
        folder = self._base / str(self.epoch)
        folder.mkdir(exist_ok=True)
        return folder / bytes(block_hash).hex()

    @property
    def block_bytes(self) -> int:
        return sum(map(sum, self.sizes))

    @property
    def shard_count(self) -> int:
        return len(self.sizes)


class Depot:
    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def connect(
        socket_path, spawn=None, *, wait_ms=10_000, call_timeout_ms=8, queue_depths=None, passes_through=False
    ) -> "Depot":
        return Depot(Path(socket_path + ".fake"))

    @property
    def control(self) -> dict:
        try:
            return json.loads((self.root / "control.json").read_text())
        except (FileNotFoundError, ValueError):
            return {}

    @property
    def attached(self) -> bool:
        return not self.control.get("dead")

    @property
    def trouble(self) -> str:
        return "" if self.attached else "the stand-in plays dead"

    def open_namespace(self, facts_json: str, layout_json: str) -> Namespace:
        canonical = json.dumps({"facts": json.loads(facts_json), "layout": json.loads(layout_json)})
        return self.open_canonical(canonical)

    def open_canonical(self, canonical: str) -> Namespace:
        return Namespace(self.root, canonical)

    def close_namespace(self, namespace) -> None:
        pass

    def store(self, namespace, *, timeout_ms=30_000, copy_json="{}") -> "Store":
        return Store(self, namespace)

    def claim(self, groups, hashes, *, skip, limit, tiers=None, label="") -> "Claim":
        assert isinstance(label, str)
        assert all(isinstance(h, bytes) for h in hashes)
        assert all(skip % per == 0 for _, _, per in groups)
        return Claim(self, groups, hashes, skip, limit)

    def reset(self, namespaces) -> None:
        if not self.attached:
            raise UnavailableError("no depot")
        for namespace in namespaces:
            namespace.next_epoch()

    def follow(self, groups=None) -> "Follower":
        assert groups is not None, "the stand-in has no list of namespaces"
        return Follower(self, groups)

    def drain(self, timeout_ms: int) -> bool:
        return True

    def stats_json(self) -> str:
        return json.dumps({"depot": {"pool_filling_bytes": 0, "pool_dirty_bytes": 0, "writes_queued": 0}})

    def close(self) -> None:
        pass


class Follower:
    """Compares the files with what was told, whenever it is asked."""

    def __init__(self, depot: Depot, groups) -> None:
        self.depot, self.groups = depot, groups
        self.told: list[set[bytes]] = [set() for _ in groups]
        self.changes: list[tuple[int, int, bool, list[bytes]]] = []
        self.closed = False

    places = property(lambda self: ["pool"])
    namespaces = property(lambda self: [])
    in_step = property(lambda self: not self.changes)

    def follow(self, groups) -> None:
        self._tell([set() for _ in self.told])
        self.groups, self.told = groups, [set() for _ in groups]

    def _tell(self, now: list[set[bytes]]) -> None:
        for group, (told, there) in enumerate(zip(self.told, now, strict=True)):
            self.changes += [(group, 0, False, [one]) for one in sorted(told - there)]
            self.changes += [(group, 0, True, [one]) for one in sorted(there - told)]
        self.told = now

    def _content(self, namespaces) -> set[bytes]:
        stored = [
            {bytes.fromhex(file.name) for file in namespace.file(b"any").parent.iterdir() if not file.suffix}
            for namespace in namespaces
            if self.depot.attached
        ]
        return set.intersection(*stored) if stored else set()

    def take(self, most=1024):
        if self.closed:
            return []
        self._tell([self._content(namespaces) for namespaces in self.groups])
        taken, self.changes = self.changes[:most], self.changes[most:]
        return taken

    def counters(self):
        return [("blocks", sum(map(len, self.told))), ("left_out", 0), ("gaps", 0), ("walks", 0)]

    def close(self) -> None:
        self.closed = True


class Claim:
    def __init__(self, depot, groups, hashes, skip, limit) -> None:
        self.polls, self.skip = depot.control.get("unsettled_polls", 0), skip
        self.result = skip if not depot.attached else self._longest(groups, hashes, skip, limit)
        self.settled, self.openings = False, 1

    @staticmethod
    def _longest(groups, hashes, skip, limit) -> int:
        step = int(np.lcm.reduce([per for _, _, per in groups]))
        limit = min(limit, len(hashes))

        def has(namespaces, per, block) -> bool:
            return all(ns.file(hashes[(block + 1) * per - 1]).exists() for ns in namespaces)

        def leading(namespaces, per, end) -> int:
            return next((b for b in range(skip // per, end // per) if not has(namespaces, per, b)), end // per) * per

        full = limit
        for namespaces, window, per in groups:
            if window == 0:
                full = leading(namespaces, per, full)
        for units in range(full - full % step, skip, -step):
            ok = True
            for namespaces, window, per in groups:
                first = max(skip // per, units // per - window)
                if window and not all(has(namespaces, per, b) for b in range(first, units // per)):
                    ok = False
            if ok:
                return units
        return skip

    def poll(self):
        self.polls -= 1
        self.settled = self.settled or self.polls < 0
        return (self.settled, self.result if self.settled else 0, 0)

    def wait(self, timeout_ms):
        return self.poll()

    def arriving(self):
        return None

    def settle_now(self):
        if not self.settled:  # nothing has come
            self.result = self.skip
        self.settled = True
        return (True, self.result, 0)

    def decline(self):
        return self.settle_now()

    def release(self, *, tell_times=False) -> None:
        pass


class Task:
    ids = itertools.count(1)

    def __init__(self, blocks: int, shards: int) -> None:
        self.id, self.block_count = next(self.ids), blocks
        self.shards: list[Future] = [Future() for _ in range(shards)]
        self.bad: dict[int, str] = {}
        self.submit_shard = None

    def done(self) -> bool:
        return all(f.done() for f in self.shards)

    def wait(self, timeout_ms=None) -> bool:
        return all(self.wait_shard(i, timeout_ms=timeout_ms) for i in range(len(self.shards)))

    def wait_shard(self, shard, *, timeout_ms=None) -> bool:
        try:
            self.shards[shard].result(None if timeout_ms is None else timeout_ms / 1e3)
        except TimeoutError:
            return False
        return True

    def failed(self, rows_per_block=1):
        assert self.done()
        return np.array(sorted(self.bad), dtype=np.int64)

    def failures(self, rows_per_block=1):
        assert self.done()
        assert rows_per_block == 1
        kinds = list(self.bad.values())
        return {kind: kinds.count(kind) for kind in set(kinds)}


def _by_shard(shards, pieces):
    """Returns sizes of pieces, as many in each shard as fill it."""
    found, left = [], list(pieces)
    for sizes in shards:
        filling = []
        while sum(filling) < sum(sizes):
            filling.append(left.pop(0))
        assert sum(filling) == sum(sizes)
        found.append(filling)
    assert not left
    return found


class Store:
    def __init__(self, depot: Depot, namespace: Namespace) -> None:
        self.depot, self.namespace = depot, namespace
        self.pool = ThreadPoolExecutor(1)
        self.loads = 0
        self.lock = Lock()

    def register_pages(self, bases, strides, page_count, keep=None, *, sizes=None) -> None:
        self.keep = keep
        assert bases.dtype == np.uint64
        assert strides.dtype == np.int64
        pieces = self.namespace.sizes if sizes is None else _by_shard(self.namespace.sizes, sizes.tolist())
        assert len(bases) == len(strides) == sum(map(len, pieces))
        self.pieces = pieces
        self.bases, self.strides, self.page_count = bases.tolist(), strides.tolist(), page_count

    def _spans(self, shard: int, page: int):
        assert 0 <= page < self.page_count
        first = sum(len(sizes) for sizes in self.pieces[:shard])
        for offset, size in enumerate(self.pieces[shard]):
            yield self.bases[first + offset] + page * self.strides[first + offset], size

    def set_decoding(self, decoding) -> None:
        assert isinstance(decoding, bool)

    def dump_pages(self, hashes, pages, *, wait_event=0, priority="normal", keep=None) -> Task:
        assert wait_event == 0
        task = self.begin_dump_pages(hashes, pages, priority=priority)
        for shard in range(self.namespace.shard_count):
            task.submit_shard(shard)
        return task

    def begin_dump_pages(self, hashes, pages, *, priority="normal") -> Task:
        assert pages.dtype == np.int64
        assert len(hashes) == len(pages)
        if not self.depot.attached:
            raise UnavailableError("no depot")
        task = Task(len(hashes), self.namespace.shard_count)
        files = [self.namespace.file(h) for h in hashes]
        buffers = [[b""] * self.namespace.shard_count for _ in hashes]
        left = set(range(self.namespace.shard_count))

        def copy(shard: int) -> None:
            time.sleep(self.depot.control.get("dump_delay_ms", 0) / 1e3)
            for i, page in enumerate(pages.tolist()):
                buffers[i][shard] = b"".join(ctypes.string_at(a, n) for a, n in self._spans(shard, page))
            left.discard(shard)
            if not left:
                for i, file in enumerate(files):
                    self._write(file, b"".join(buffers[i]))
            task.shards[shard].set_result(None)

        task.submit_shard = lambda shard, *, wait_event=0, keep=None: self.pool.submit(copy, shard)
        return task

    def _write(self, file: Path, data: bytes) -> None:
        old = file.read_bytes() if file.exists() else None
        if old is not None and old != data and os.environ.get("KVDEPOT_FAKE_STRICT"):
            with (self.depot.root / "conflicts").open("a") as log:
                # With the same tokens in another batch, float32 values may differ in their last bits, but no more.
                apart = np.abs(np.frombuffer(old, np.float32) - np.frombuffer(data, np.float32)).max()
                log.write(f"{apart:.6f} {file.name}\n")
        if old is None:
            part = file.with_suffix(f".{os.getpid()}")
            part.write_bytes(data)
            os.rename(part, file)

    def load_pages(self, hashes, pages, *, wait_event=0, patience_ms=None, keep=None) -> Task:
        assert wait_event == 0
        assert pages.dtype == np.int64
        assert len(hashes) == len(pages)
        if not self.depot.attached:
            raise UnavailableError("no depot")
        task = Task(len(hashes), self.namespace.shard_count)
        control = self.depot.control
        starts = np.cumsum([0, *map(sum, self.namespace.sizes)]).tolist()
        found: list[bytes] = []
        for i, h in enumerate(hashes):
            self.loads += 1
            every = control.get("fail_load_every", 0)
            hit_rank = control.get("fail_rank", self.namespace.shard) == self.namespace.shard
            try:
                unlucky = every and hit_rank and self.loads % every == 0
                data = (Path("/nowhere") if unlucky else self.namespace.file(h)).read_bytes()
                if os.environ.get("KVDEPOT_FAKE_CORRUPT"):
                    data = bytes(256 - b & 255 for b in data)
            except OSError:
                task.bad[i] = "not_found"
                data = b""
            found.append(data)

        def copy() -> None:
            for shard, begin in enumerate(starts[:-1]):
                time.sleep(control.get("load_delay_ms", 0) / 1e3)
                for i, page in enumerate(pages.tolist()):
                    at = begin
                    for address, size in self._spans(shard, page):
                        # A failed block leaves garbage, as an interrupted copy would.
                        ctypes.memmove(address, found[i][at : at + size] or b"\x3f" * size, size)
                        at += size
                task.shards[shard].set_result(None)

        self.pool.submit(copy)
        return task

    def load(self, hashes, shards, addresses, keep=None, *, wait_event=0) -> Task:
        """Dumps as the core does, but immediately: a row is a shard of a block."""
        assert wait_event == 0
        assert addresses.dtype == np.uint64
        task = Task(len(hashes), 1)
        starts = np.cumsum([0, *map(sum, self.namespace.sizes)]).tolist()
        for row, (block_hash, shard) in enumerate(zip(hashes, shards.tolist(), strict=True)):
            sizes, at = self.namespace.sizes[shard], starts[shard]
            try:
                data = self.namespace.file(block_hash).read_bytes()
            except OSError:
                task.bad[row] = "not_found"
                continue
            for address, size in zip(addresses[row].tolist(), sizes, strict=True):
                ctypes.memmove(address, data[at : at + size], size)
                at += size
        task.shards[0].set_result(None)
        return task

    def lookup(self, hashes):
        return np.array([self.namespace.file(h).exists() for h in hashes], dtype=np.bool_)

    def lookup_on_prefix(self, hashes) -> int:
        return sum(1 for _ in itertools.takewhile(lambda h: self.namespace.file(h).exists(), hashes))

    def prefetch(self, hashes) -> None:
        pass

    def close(self, wait_ms=0) -> bool:
        self.pool.shutdown()
        return True
