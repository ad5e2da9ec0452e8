"""The Rust core's face: attachment to a depot, namespaces, claims, stores and tasks.

Every call releases the interpreter lock before it waits or copies, and any number of threads may use one object at once.
Objects belong to the process that made them: in a forked child, calls raise ``UnavailableError`` (``Depot.attached`` is
false, ``close`` and ``Claim.release`` do nothing), and the child holds none of the parent's connections. Sizes are bytes and times milliseconds unless a
name says otherwise. Numbers that could be taken for one another are keyword-only. Block hashes are ``bytes`` of 1 to 64; 16 bytes are taken as they are, others reduced to 16.
"""

import os
from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt

__all__ = [
    "PROTOCOL_VERSION",
    "BlockNotFoundError",
    "BusyError",
    "Claim",
    "ConfigError",
    "CorruptError",
    "Depot",
    "DepotTimeoutError",
    "KVDepotError",
    "Meter",
    "Namespace",
    "NoSpaceError",
    "ProtocolError",
    "Recorder",
    "StorageError",
    "Store",
    "Task",
    "Trace",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
    "bench_copies",
    "block_hash",
    "crc64nvme",
    "describe_devices",
    "init_logging",
    "keep_pool",
    "namespace_id",
    "serve",
    "tier_table",
]

__version__: str
PROTOCOL_VERSION: int

class KVDepotError(Exception):
    """Base of every failure of the store; ``kind`` is its stable lower-case name (``timeout``, ``no_space`` …)."""

    kind: str

class ConfigError(KVDepotError, ValueError): ...
class StorageError(KVDepotError, OSError): ...
class NoSpaceError(StorageError): ...
class CorruptError(StorageError): ...
class BlockNotFoundError(KVDepotError, KeyError): ...
class DepotTimeoutError(KVDepotError, TimeoutError): ...
class BusyError(KVDepotError): ...
class ProtocolError(KVDepotError): ...
class UnavailableError(KVDepotError, ConnectionError): ...
class UnsupportedError(KVDepotError): ...

@final
class Namespace:
    """A namespace known to a depot: its description and layout."""

    @property
    def canonical(self) -> str:
        """The canonical description; ``Depot.open_canonical`` opens the same namespace from it in another process."""
    @property
    def id(self) -> str:
        """32 hex digits: fingerprint of the description, the same through all resets."""
    @property
    def block_bytes(self) -> int: ...
    @property
    def shard_count(self) -> int: ...

@final
class Depot:
    """This process's attachment to a depot: embedded in the process, or the node's own process over a unix socket."""

    @staticmethod
    def embedded(config_json: str) -> Depot:
        """Runs a depot inside this process. ``config_json`` is what ``kvdepot.config`` writes for the core.

        Raises:
            ConfigError: a value is wrong. StorageError: a directory cannot be used.
        """
    @staticmethod
    def connect(
        socket_path: str,
        spawn: Sequence[str] | None = None,
        *,
        wait_ms: int = 10_000,
        call_timeout_ms: int = 8,
        queue_depths: tuple[int, int] | None = None,
        passes_through: bool = False,
    ) -> Depot:
        """Attaches to the depot at ``socket_path``, and starts one with the command ``spawn`` when none answers.

        Waits up to ``wait_ms`` for the first attachment. When that passes, the object is returned unattached
        (``attached`` is false; every lookup is a miss) and goes on trying in the background, as it does whenever the
        depot dies. ``call_timeout_ms`` bounds every call that an engine thread waits for (lookups, claims, leases);
        a lookup waits longer for tiers of a depot that answers other calls. ``queue_depths``: how many tasks may wait in a
        store, and how many shards of blocks may be under way in a task; ``None`` = as many as the depot was started with.
        ``passes_through``: whether the depot's pool is ``Staging``, after which log lines of tasks are worded.

        Raises:
            ProtocolError: something else, or another version, answers on the socket.
        """
    @property
    def attached(self) -> bool:
        """Whether calls reach a depot now."""
    @property
    def trouble(self) -> str:
        """Why no depot is attached, as far as is known: why it was lost, else why the last try failed. Empty while one
        is."""
    def open_namespace(self, facts_json: str, layout_json: str) -> Namespace:
        """Opens a namespace from its facts (a JSON object without fractions) and layout (``[[count, [sizes…]], …]``:
        runs of equal shards, each with its tensors' sizes in bytes). Works while unattached, too."""
    def open_canonical(self, canonical: str) -> Namespace: ...
    def store(self, namespace: Namespace, *, timeout_ms: int = 30_000, copy_json: str = "{}") -> Store:
        """What dumps and loads blocks of one namespace.

        Args:
            timeout_ms: bound of each task.
            copy_json: JSON object that says what is copied and how; ``KVDepotConfig.copy_json`` makes it.

        Raises:
            ConfigError, UnavailableError, UnsupportedError: there is no such copy engine here."""
    def claim(
        self,
        groups: Sequence[tuple[Sequence[Namespace], int, int]],
        hashes: Sequence[bytes],
        *,
        skip: int,
        limit: int,
        label: str = "",
    ) -> Claim:
        """Claims the longest hit over all groups and ranks, leased in the pool until released.

        Args:
            groups: one ``(namespaces of all ranks, window_blocks, hashes_per_block)`` a KV-cache group;
                ``window_blocks`` 0 = full attention, else how many last blocks of the hit the group needs.
            hashes: the request's chained hashes, one per hash unit.
            skip: leading units that the engine has itself (multiple of every ``hashes_per_block``).
            limit: no hit beyond this many units.
            label: what the engine calls the request, for ``kvdepot why``; the depot keeps its first 96 characters.

        Never raises for an operational failure: a claim on a dead or hung depot settles with no hit.
        """
    def reset(self, namespaces: Sequence[Namespace]) -> None:
        """Moves namespaces to their next epoch: no block dumped before is served again, from any tier.

        Raises:
            UnavailableError, DepotTimeoutError: the reset was not confirmed.
        """
    def drain(self, timeout_ms: int) -> bool:
        """Waits until what was dumped so far has been written to the tiers; false when the time passed first."""
    def stats_json(self) -> str:
        """Counters and gauges of depot and client as a JSON object."""
    def close(self) -> None: ...

@final
class Claim:
    """A hit that is being made ready: tier blocks are brought into the pool and leased."""

    def poll(self) -> tuple[bool, int, int]:
        """``(settled, units, units_from_tier)``: when settled, ``units`` leading hash units (``skip`` included) are
        verified, in the pool and leased for all ranks; ``units_from_tier`` of them came from below the pool. Asks the
        depot at most every half millisecond; a claim that nobody polls for ``timeout_ms`` ends by itself."""
    def wait(self, timeout_ms: int) -> tuple[bool, int, int]:
        """Polls until settled or the time has passed."""
    def arriving(self) -> tuple[int, int, int, int, int] | None:
        """``(units, units_now, units_from_tier, blocks_come, blocks_left)`` as of the last poll, while every block of the
        hit is in the pool or on its way there: ``units`` if all of them come, at least ``units_now`` if the claim were
        settled now. A load may begin then: it waits for each block itself, and fails those that never come."""
    def settle_now(self) -> tuple[bool, int, int]:
        """Takes what has come so far (best effort): settled from now on."""
    def decline(self) -> tuple[bool, int, int]:
        """As ``settle_now``, because computing the rest is faster than waiting: the depot counts it as ``not_worth_it``."""
    def release(self) -> None:
        """Drops the leases. Idempotent; also done when the object is collected."""

@final
class Task:
    """Blocks on their way: to the depot (dump) or to the engine's memory (load)."""

    @property
    def id(self) -> int: ...
    @property
    def block_count(self) -> int: ...
    def done(self) -> bool:
        """Whether all of a dump has ended, or nothing is written any more and all that has not failed is in place (load).
        On a device that hangs a dump ends at its time-out all the same (``failures`` says ``timeout``), though the device
        may still read its pages; a load ends when the device is through."""
    def wait(self, timeout_ms: int | None = None) -> bool:
        """Waits until done; false when the time passed first. Never raises for a block's failure: see ``failed``."""
    def wait_shard(self, shard: int, *, timeout_ms: int | None = None) -> bool:
        """Waits until shard ``shard`` of every block is in place (load) or copied out (dump), or has failed."""
    def wait_shard_on(self, shard: int, *, stream: int, timeout_ms: int | None = None) -> bool:
        """For a load on a device: lets ``stream`` (a ``CUstream``) wait on the device until shard ``shard`` of every
        block is in place or has failed. Returns when all of it has been handed to the device; false when the time passed
        first. On engines without streams this is ``wait_shard``."""
    def failed(self, rows_per_block: int = 1) -> npt.NDArray[np.int64]:
        """After ``done``: indexes of the blocks that were not stored or not loaded, ascending. ``rows_per_block`` rows of
        the task count as one block."""
    def failures(self, rows_per_block: int = 1) -> dict[str, int]:
        """After ``done``: how many blocks failed, by kind (``not_found``, ``no_space``, ``timeout`` …)."""
    def submit_shard(self, shard: int, *, wait_event: int = 0, keep: object = None) -> None:
        """For a task made by ``begin_dump_pages``: shard ``shard`` of every block may be read, after the device event
        ``wait_event`` (a ``CUevent``; 0 = now), which must not be recorded again until the task is done. ``keep``, such as
        the event's owner, is held until the shard's copy has ended."""
    def fileno(self) -> int:
        """A descriptor that becomes readable when the task is done; owned by the task."""

@final
class Store:
    """Dumps and loads blocks of one namespace between this process's memory and the depot.

    ``keep`` is an object whose reference the core holds until no copy of the task touches its memory any more: also when
    the task has timed out while a device still copies, and whether or not the ``Task`` is kept. It is released by a later
    call of the store or of one of its tasks."""

    @property
    def namespace(self) -> Namespace: ...
    def register_pages(
        self,
        bases: npt.NDArray[np.uint64],
        strides: npt.NDArray[np.int64],
        page_count: int,
        keep: object = None,
        *,
        sizes: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        """Says where the engine's pages lie: tensor ``t`` (counted over all shards of the layout, in order) of page ``p``
        begins at ``bases[t] + p * strides[t]``. The memory must stay mapped until the store is closed; ``keep`` is held
        until then, and until every task over these pages has ended.

        Args:
            sizes: bytes of the pieces that a page is in, where they are others than the layout's tensors; there is one
                base and one stride for each. One after another they fill the layout's shards; ``None`` = the tensors.

        Raises:
            ConfigError: the numbers of bases, strides and pieces differ, or the pieces do not fill the shards."""
    def set_decoding(self, decoding: bool) -> None:
        """Says whether the engine decodes in the steps that follow: a device's copies then leave its multiprocessors
        alone, even if that is slower. Holds for all stores of the device."""
    def dump_pages(
        self,
        hashes: Sequence[bytes],
        pages: npt.NDArray[np.int64],
        *,
        wait_event: int = 0,
        keep: object = None,
    ) -> Task:
        """Stores page ``pages[i]`` as block ``hashes[i]``. Blocks that the depot has already are not copied again.

        Args:
            wait_event: device event (a ``CUevent``) after which the pages may be read; 0 = now. It must not be recorded
                again until the task is done, and stay valid until the copies have ended: its owner can be ``keep``."""
    def begin_dump_pages(self, hashes: Sequence[bytes], pages: npt.NDArray[np.int64]) -> Task:
        """Like ``dump_pages``, but each shard is read only after ``Task.submit_shard`` (layer-wise save)."""
    def load_pages(
        self,
        hashes: Sequence[bytes],
        pages: npt.NDArray[np.int64],
        *,
        wait_event: int = 0,
        patience_ms: int | None = None,
        keep: object = None,
    ) -> Task:
        """Loads block ``hashes[i]`` into page ``pages[i]``, shard by shard in order, after ``wait_event`` as in
        ``dump_pages``: nothing that the device still computes may use the pages then.

        Args:
            patience_ms: how long to wait for blocks that are not in the pool, after the others have been copied;
                ``None`` = as long as the task may take."""
    def dump(
        self,
        hashes: Sequence[bytes],
        shards: npt.NDArray[np.int64],
        addresses: npt.NDArray[np.uint64],
        keep: object = None,
    ) -> Task:
        """Stores shard ``shards[i]`` of block ``hashes[i]`` from ``addresses[i, t]``; a block is visible when all its
        shards came, in one task or several."""
    def load(
        self,
        hashes: Sequence[bytes],
        shards: npt.NDArray[np.int64],
        addresses: npt.NDArray[np.uint64],
        keep: object = None,
    ) -> Task: ...
    def lookup(self, hashes: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which blocks the depot has, in the pool or a tier."""
    def lookup_on_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks the depot has."""
    def prefetch(self, hashes: Sequence[bytes]) -> None:
        """Asks for blocks to be brought into the pool; returns at once."""
    def close(self, wait_ms: int = 0) -> bool:
        """Takes no more tasks, and waits up to ``wait_ms`` for those under way; false when some are left. They go on, and
        what they touch stays held. Idempotent."""

def tier_table() -> str:
    """JSON: the tiers of this build in the order of the documentation, each with its settings, and the keys of a configuration
    that say them; ``later`` are the names of tiers to come. ``kvdepot.config.tier_table`` reads it."""

def describe_devices(cache_dir: str) -> str:
    """JSON: the CUDA driver, or what is wrong with it, and the devices with their copy engines and what was measured on
    them, which is kept in ``cache_dir``; ``adapters`` are the RDMA adapters, or ``adapters_problem`` says why there are none. Makes no
    context and measures nothing."""

def bench_copies(
    device: str = "0", cache_dir: str | None = None, *, smoke: bool = False, kernel_blocks: int | None = None
) -> str:
    """JSON: rates of every copy engine on a device (number, ``GPU-…`` or PCI bus id), some seconds each; ``missing`` says
    why an engine cannot be used here. What the engine ``auto`` measures for itself is kept in ``cache_dir``. ``smoke``: small sizes,
    whose rates mean nothing. ``kernel_blocks``: blocks of 256 threads that the kernel runs on at most; ``None`` = 64.

    Raises:
        UnavailableError, UnsupportedError, ConfigError: there is no driver or no such device."""

@final
class Trace:
    """A trace of requests in memory, and what caches would do with it."""

    def __new__(cls) -> Trace: ...
    def push_json(self, line: str, *, later_ms: int = 0) -> None:
        """Adds a request in Mooncake's format, or a session with numbers of its own; ``later_ms`` is added to its time.

        Raises:
            ConfigError: it is neither."""
    def sort(self) -> None:
        """Brings the requests into the order of their time."""
    def counts(self) -> tuple[int, int, int]:
        """Requests, blocks that they name, and different ones of these."""
    def requests(self) -> list[tuple[int, int, int, list[int]]]:
        """Milliseconds, tokens of prompt and answer, and blocks, numbered as they come."""
    def replay(self, levels_json: str) -> str:
        """What a pool and tiers would have hit. ``levels_json``: a list of ``{"policy", "capacity"}`` in blocks, the pool first, for
        tiers also ``"write"`` (``through``, ``second_use``, ``cold``) and ``"promote"``. Returns a JSON object with ``references``,
        ``hits`` and ``levels``.

        Raises:
            ConfigError: a level is wrong."""
    def belady(self, capacity: int) -> int:
        """Blocks of hits if the order of eviction knew the future."""

@final
class Recorder:
    """Writes requests into the files of a trace by a thread of its own; the newest files are kept."""

    def __new__(
        cls, directory: str | os.PathLike[str], name: str, *, block_tokens: int, file_bytes: int, files_max: int
    ) -> Recorder:
        """Begins a recording.

        Raises:
            StorageError: there can be no file in the directory."""
    def record(
        self, block_hashes: Sequence[bytes], *, timestamp_ms: int, input_length: int, output_length: int
    ) -> bool:
        """Takes a request, to be written later; false when too many wait, and this one is dropped. Never waits."""
    def counters(self) -> tuple[int, int, int]:
        """Requests written, dropped because too many waited, and lost because the disk refused them."""
    def close(self, wait_ms: int = 2000) -> bool:
        """Ends the recording, and says whether all that waited was written within that time."""

@final
class Meter:
    """Counts what depots of several sizes, in blocks, and an endless one would give; by a thread of its own."""

    def __new__(cls, policy: str, capacities: Sequence[int]) -> Meter: ...
    def look_up(self, block_hashes: Sequence[bytes]) -> bool:
        """A request asks for these blocks, from where the engine's own cache ends; false when too many wait to be counted."""
    def store(self, block_hashes: Sequence[bytes]) -> bool:
        """The engine has computed these blocks."""
    def settle(self, wait_ms: int) -> bool:
        """Waits until all is counted that was handed over before."""
    def report_json(self) -> str:
        """Blocks ``asked`` for, the ``ceiling`` of an endless depot, what each of ``sizes`` has ``held`` and ``hits``, and how many calls were
        ``dropped``."""

def serve(
    config_json: str,
    socket_path: str,
    *,
    idle_exit_ms: int = 0,
    wire_json: str | None = None,
    take_over: bool = False,
    wait_for_lock: bool = False,
) -> None:
    """Runs a depot with its local door at ``socket_path`` until a signal handler raises, or until nobody was attached
    for ``idle_exit_ms`` (0 = never). Returns when another depot already serves that socket. ``wire_json`` opens a wire
    door, too; then it is never idle. What is in no tier yet is written before it returns, for ``drain_timeout_ms`` of the
    configuration. A panic in a thread of the depot aborts the process. ``take_over``: with the pool and the blocks of the
    depot that serves the socket, which ends then; with an empty pool where none does. ``wait_for_lock``: while another
    depot serves the socket, waits until that one ends; ``take_over`` goes first.

    Raises:
        ConfigError, StorageError. With ``take_over`` also when the running depot's pool has another size.
        VersionError: with ``take_over``, the running depot has another version.
        UnavailableError: another process holds the socket's lock, and no depot answers.
    """

def crc64nvme(data: bytes) -> int: ...
def block_hash(engine_hash: bytes) -> bytes:
    """The 16 bytes that an engine's hash becomes in a key."""

def namespace_id(facts_json: str, layout_json: str, *, epoch: int = 0) -> str: ...
def keep_pool() -> None:
    """What the process does that keeps a depot's pool beyond a crash of it. Only a depot starts it, over its standard
    input."""

def init_logging(
    level: str,
    path: str | None = None,
    *,
    json: bool = False,
    max_bytes: int = 0,
    max_files: int = 1,
    burst_lines: int = 0,
) -> None:
    """Log lines of the core go to standard error, or to ``path``; ``level``: error, warn, info, debug, trace.

    ``max_bytes`` and ``max_files`` bound the file ``path`` and those before it; 0 bytes = no bound. Of one kind of line no
    more than ``burst_lines`` are written in ten seconds; 0 = no bound. Only the first call of a process counts.
    """
