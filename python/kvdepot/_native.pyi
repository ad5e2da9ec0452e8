"""Interface of the Rust core: attachment to a depot, namespaces, claims, stores and tasks.

Every call releases the interpreter lock before it waits or copies. Any number of threads may use one object
concurrently. Objects belong to the process that created them: in a forked child, calls raise ``UnavailableError``
(``Depot.attached`` is false, ``close`` and ``Claim.release`` do nothing), and the child holds none of the parent's
connections. Sizes are bytes and times milliseconds unless a name says otherwise. Numbers that are easily confused are
keyword-only. Block hashes are ``bytes`` of length 1 to 64; 16 bytes are used unchanged, other lengths are reduced
to 16.
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
    "Follower",
    "KVDepotError",
    "MediumCheck",
    "MediumReader",
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
    "decode_block",
    "describe_devices",
    "init_logging",
    "inspect_medium",
    "keep_pool",
    "namespace_id",
    "serve",
    "tier_table",
]

__version__: str
PROTOCOL_VERSION: int

class KVDepotError(Exception):
    """Base of every error of kvdepot; ``kind`` is its stable lower-case name (``timeout``, ``no_space`` …)."""

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
        """Canonical description, from which ``Depot.open_canonical`` opens the same namespace in another process."""
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
        """Runs a depot inside this process. ``config_json`` is the JSON that ``kvdepot.config`` writes for the core.

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
        """Attaches to the depot at ``socket_path``. If none answers, starts one with the command ``spawn``.

        Waits up to ``wait_ms`` for the first attachment. On timeout the object is returned unattached (``attached`` is
        false; every lookup is a miss) and keeps trying in the background, as it does whenever the depot dies.
        ``call_timeout_ms`` bounds every call that an engine thread waits for (lookups, claims, leases); a lookup waits
        longer for the tiers of a depot that answers other calls. ``queue_depths``: limits of the tasks that may wait in
        a store, and of the shards of blocks in flight in a task; ``None`` = the depot's own limits. ``passes_through``:
        whether the depot's pool is ``Staging``; it affects only the wording of tasks' log lines.

        Raises:
            ProtocolError: another service, or another version of kvdepot, answers on the socket.
        """
    @property
    def attached(self) -> bool:
        """Whether calls currently reach a depot."""
    @property
    def trouble(self) -> str:
        """Why no depot is attached, as far as is known: the reason it was lost, else the reason the last attempt
        failed. Empty while one is attached."""
    def open_namespace(self, facts_json: str, layout_json: str) -> Namespace:
        """Opens a namespace from its facts (a JSON object without fractions) and layout (``[[count, [sizes…]], …]``:
        runs of equal shards, each with its tensor sizes in bytes). Also works while unattached."""
    def open_canonical(self, canonical: str) -> Namespace: ...
    def close_namespace(self, namespace: Namespace) -> None:
        """Tells the depot that this process does not use a namespace any more, so that it does not count towards the
        process's limit. Call it after all stores and claims of it have ended. Waits up to 5 s for a depot that hangs."""
    def store(self, namespace: Namespace, *, timeout_ms: int = 30_000, copy_json: str = "{}") -> Store:
        """Returns a store that dumps and loads the blocks of one namespace.

        Args:
            timeout_ms: time limit of each task.
            copy_json: JSON object that selects the memory and the copy engine, from ``KVDepotConfig.copy_json``.

        Raises:
            ConfigError, UnavailableError, UnsupportedError: this copy engine is not available."""
    def claim(
        self,
        groups: Sequence[tuple[Sequence[Namespace], int, int]],
        hashes: Sequence[bytes],
        *,
        skip: int,
        limit: int,
        tiers: Sequence[str] | None = None,
        label: str = "",
    ) -> Claim:
        """Claims the longest hit over all groups and ranks. Its blocks are leased in the pool until released.

        Args:
            groups: one ``(namespaces of all ranks, window_blocks, hashes_per_block)`` per KV-cache group.
                ``window_blocks`` is the number of last blocks of the hit that the group needs; 0 = full attention.
            hashes: the request's chained hashes, one per hash unit.
            skip: leading units that the engine already has (a multiple of every ``hashes_per_block``).
            limit: longest hit to return, in units.
            tiers: names, as in the depot's pipeline, of the tiers that blocks may come from; ``None`` = all, empty =
                the pool alone.
            label: what the engine calls the request, for ``kvdepot why``; the depot keeps its first 96 characters.

        Never raises for an operational failure: a claim on a dead or hung depot settles with no hit.

        Raises:
            ConfigError: the depot has no tier of that name.
        """
    def reset(self, namespaces: Sequence[Namespace]) -> None:
        """Moves namespaces to their next epoch: blocks dumped before are never served again, from any tier.

        Raises:
            UnavailableError, DepotTimeoutError: the depot did not confirm the reset.
        """
    def follow(self, groups: Sequence[Sequence[Namespace]] | None = None) -> Follower:
        """Follows what can be read where, on a thread of its own. Also works while unattached.

        Args:
            groups: the namespaces of each group; a block counts for a group when all of its namespaces have it. ``None``
                = every namespace of the depot, each as a group of its own.
        """
    def drain(self, timeout_ms: int) -> bool:
        """Waits until everything dumped so far is written to the tiers. Returns false on timeout.

        Raises:
            UnavailableError, DepotTimeoutError: no depot answers.
        """
    def stats_json(self) -> str:
        """Returns counters and gauges of depot and client as a JSON object."""
    def close(self) -> None: ...

@final
class Claim:
    """A hit that is being prepared: blocks are fetched from the tiers into the pool and leased."""

    def poll(self) -> tuple[bool, int, int]:
        """Returns ``(settled, units, units_from_tier)``: when settled, ``units`` leading hash units (``skip`` included)
        are verified, in the pool and leased for all ranks; ``units_from_tier`` of them came from below the pool. Asks
        the depot at most every half millisecond; once settled, a few times within ``timeout_ms``, to keep the leases. A
        claim that is not polled for ``timeout_ms`` ends, and the next poll makes it anew: it may be unsettled again."""
    def wait(self, timeout_ms: int) -> tuple[bool, int, int]:
        """Polls until the claim settles or ``timeout_ms`` has passed."""
    @property
    def openings(self) -> int:
        """How often the claim was opened at a depot: more than once if a depot has let it go, or another one took over."""
    def arriving(self) -> tuple[int, int, int, int, int] | None:
        """Returns ``(units, units_now, units_from_tier, blocks_come, blocks_left)`` as of the last poll, while every
        block of the hit is in the pool or in flight to it; else ``None``. The hit has ``units`` if all of them arrive,
        and at least ``units_now`` if the claim is settled now. A load may begin then: it waits for each block itself,
        and fails those that never arrive."""
    def settle_now(self) -> tuple[bool, int, int]:
        """Settles the claim with the blocks that have arrived so far (best effort)."""
    def decline(self) -> tuple[bool, int, int]:
        """Like ``settle_now``, because computing the rest is faster than waiting; counted as ``not_worth_it``."""
    def release(
        self, *, tell_times: bool = False
    ) -> tuple[int, int | None, int | None, bool, list[tuple[str, int, int, int]]] | None:
        """Drops the leases. Idempotent. Also happens when the object is garbage-collected.

        ``tell_times``: returns when the claim got how far at the depot, for traces: ``(opened_ns, admitted_ns, settled_ns,
        queued, tiers)``, in nanoseconds before the answer. ``admitted_ns``: the hit and the room for all of it were known;
        ``settled_ns``: the hit was final; each is ``None`` if that did not happen. ``queued``: whether the claim waited for
        room. ``tiers``: for each tier ``(name, blocks, first_ns, last_ns)``, when the first and the last of its blocks came.
        ``None`` without ``tell_times``, and if no depot holds the claim any more.
        """

@final
class Follower:
    """Follows a depot's events: reads a snapshot, then changes, and keeps in step over lost events, resets of a namespace
    and restarts of the depot. It tracks at most 4 Mi blocks, about 32 bytes each, and leaves out the others."""

    def take(self, most: int = 1024) -> list[tuple[int, int, bool, list[bytes]]]:
        """Takes the oldest changes, of at most ``most`` blocks. Never waits.

        Each is ``(group, place, stored, hashes)``: blocks that can be read in a place from now on, or (``stored`` false)
        cannot any more. ``group`` is the position among the groups, ``place`` in ``places``; a hash has 16 bytes. Only
        blocks that were reported as stored are reported as removed, and are reported again only after that. While 65 536
        changes wait here, nothing more is read.
        """
    def follow(self, groups: Sequence[Sequence[Namespace]]) -> None:
        """Follows other namespaces. All blocks that were reported as stored are reported as removed first."""
    @property
    def places(self) -> list[str]:
        """``pool``, then the names of the depot's tiers; empty before the first answer of a depot."""
    @property
    def namespaces(self) -> list[str]:
        """Without ``groups``: each group's namespace, by its name of 32 hex digits. Otherwise empty."""
    @property
    def in_step(self) -> bool:
        """Whether everything that the depot had at the last look, normally within 50 ms, was told and taken."""
    def counters(self) -> list[tuple[str, int]]:
        """Returns ``blocks`` kept in mind now, blocks ``left_out`` because there were too many, ``gaps`` (times that events
        were missed and everything was read again) and ``walks`` over everything."""
    def close(self) -> None:
        """Ends the thread. Idempotent. Also happens when the object is garbage-collected, or the depot is closed."""

@final
class Task:
    """A dump (to the depot) or a load (to the engine's memory) in flight."""

    @property
    def id(self) -> int: ...
    @property
    def block_count(self) -> int: ...
    def done(self) -> bool:
        """Returns whether a dump has ended, or a load writes nothing more and every block that did not fail is in
        place. On a device that hangs, a dump still ends at its timeout (``failures`` says ``timeout``), while the
        device may go on reading its pages; a load ends when the device has finished."""
    def wait(self, timeout_ms: int | None = None) -> bool:
        """Waits until done. Returns false on timeout. Never raises for a block's failure: see ``failed``."""
    def wait_shard(self, shard: int, *, timeout_ms: int | None = None) -> bool:
        """Waits until shard ``shard`` of every block is in place (load) or copied out (dump), or has failed."""
    def wait_shard_on(self, shard: int, *, stream: int, timeout_ms: int | None = None) -> bool:
        """For a load on a device: makes ``stream`` (a ``CUstream``) wait on the device until shard ``shard`` of every
        block is in place or has failed. Returns once all copies were submitted to the device; false on timeout. On copy
        engines without streams this is ``wait_shard``."""
    def failed(self, rows_per_block: int = 1) -> npt.NDArray[np.int64]:
        """After ``done``: returns the indexes of the blocks that were not stored or not loaded, ascending.
        ``rows_per_block`` rows of the task count as one block."""
    def failures(self, rows_per_block: int = 1) -> dict[str, int]:
        """After ``done``: returns the number of failed blocks by kind (``not_found``, ``no_space``, ``timeout`` …)."""
    def submit_shard(self, shard: int, *, wait_event: int = 0, keep: object = None) -> None:
        """For a task from ``begin_dump_pages``: allows shard ``shard`` of every block to be read after the device event
        ``wait_event`` (a ``CUevent``; 0 = now), which must not be recorded again until the task is done. ``keep``, for
        example the event's owner, is held until the shard's copy has ended."""
    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when the task is done. The task owns it."""

@final
class Store:
    """Dumps and loads blocks of one namespace between this process's memory and the depot.

    The core holds a reference to ``keep`` until no copy of the task touches its memory any more, even if the task
    has timed out while a device still copies, and whether or not the ``Task`` is kept. A later call of the store or
    of one of its tasks releases it."""

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
        """Registers the engine's pages: tensor ``t`` (counted over all shards of the layout, in order) of page ``p``
        begins at ``bases[t] + p * strides[t]``. The memory must stay mapped until the store is closed. ``keep`` is held
        until then, and until every task over these pages has ended.

        Args:
            sizes: sizes in bytes of the pieces of a page, if they differ from the layout's tensors. Each piece has one
                base and one stride, and together, in order, they fill the layout's shards. ``None`` = the tensors.

        Raises:
            ConfigError: the numbers of bases, strides and pieces differ, or the pieces do not fill the shards."""
    def set_decoding(self, decoding: bool) -> None:
        """Sets whether the engine decodes in the steps that follow. While it does, a device's copies leave its
        multiprocessors alone, even if that is slower. Applies to all stores of the device."""
    def dump_pages(
        self,
        hashes: Sequence[bytes],
        pages: npt.NDArray[np.int64],
        *,
        wait_event: int = 0,
        priority: str = "normal",
        keep: object = None,
    ) -> Task:
        """Stores page ``pages[i]`` as block ``hashes[i]``. Blocks that the depot already has are not copied again.

        Args:
            wait_event: device event (a ``CUevent``) after which the pages may be read; 0 = now. It must not be recorded
                again until the task is done, and must stay valid until the copies have ended: pass its owner as
                ``keep``.
            priority: ``low``, ``normal`` or ``high``: how long the pool keeps the blocks, compared with others."""
    def begin_dump_pages(
        self, hashes: Sequence[bytes], pages: npt.NDArray[np.int64], *, priority: str = "normal"
    ) -> Task:
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
        ``dump_pages``: work that the device still has to do then must not use the pages.

        Args:
            patience_ms: how long to wait for blocks that are not in the pool, after the others have been copied;
                ``None`` = until the task's time limit."""
    def dump(
        self,
        hashes: Sequence[bytes],
        shards: npt.NDArray[np.int64],
        addresses: npt.NDArray[np.uint64],
        keep: object = None,
        *,
        wait_event: int = 0,
        priority: str = "normal",
    ) -> Task:
        """Stores shard ``shards[i]`` of block ``hashes[i]`` from ``addresses[i, t]``, after ``wait_event`` as in
        ``dump_pages``. A block becomes visible once all its shards were stored, by one task or several."""
    def load(
        self,
        hashes: Sequence[bytes],
        shards: npt.NDArray[np.int64],
        addresses: npt.NDArray[np.uint64],
        keep: object = None,
        *,
        wait_event: int = 0,
    ) -> Task: ...
    def lookup(self, hashes: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Returns for each block whether the depot has it, in the pool or a tier: shape ``(len(hashes),)``."""
    def lookup_on_prefix(self, hashes: Sequence[bytes]) -> int:
        """Returns how many leading blocks the depot has."""
    def prefetch(self, hashes: Sequence[bytes]) -> None:
        """Asks the depot to bring blocks into the pool. Returns immediately."""
    def close(self, wait_ms: int = 0) -> bool:
        """Refuses new tasks, and waits up to ``wait_ms`` for those in flight, and for copies that a device has not
        finished although their task has failed. Returns false if some are left: they go on, and the memory that they
        touch stays held. Idempotent."""

def tier_table() -> str:
    """Returns JSON: the tiers of this build in the order of the documentation, each with its settings and their
    configuration keys; ``later`` are the names of planned tiers. ``kvdepot.config.tier_table`` reads it."""

def inspect_medium(tier: str, settings: str) -> str:
    """Returns JSON: what the medium of a tier (``Dax`` or ``Slab``) with these settings (JSON) is: ``kind``
    (``dax_device``, ``block_device``, ``file``; ``missing``: the tier creates the file), ``bytes``, and
    ``formatted_bytes``, which is ``None`` if it is empty. Changes nothing, and takes the medium's lock for a moment.

    Raises:
        KVDepotError: the tier could not use it. ``busy``: another process does.
    """

@final
class MediumReader:
    """The medium of a ``Slab`` or ``Dax`` tier, opened only to be read, and the list of what lay there then. Nothing on it
    is changed. A depot may use it meanwhile.

    Raises:
        KVDepotError: it cannot be read, or holds something else.
    """

    def __new__(cls, path: str | os.PathLike[str]) -> MediumReader: ...
    @property
    def tier(self) -> str:
        """``Slab`` or ``Dax``."""
    @property
    def problem(self) -> str | None:
        """What is wrong with the medium apart from blocks and namespaces."""
    def namespaces(self) -> list[tuple[str, int, int, int, str | None]]:
        """Returns for each namespace its name (32 hex digits), its epoch, the number of its blocks, their bytes, and why
        the next start of a depot drops them (``None`` = it does not)."""
    def blocks(
        self, namespace: str, *, start: int = 0, most: int = 4096
    ) -> tuple[list[tuple[str, int, int, int]], int | None]:
        """Returns at most ``most`` blocks of a namespace in the order of their places, and where to continue (``None`` =
        these are the last ones). For each: its hash (32 hex digits), offset, bytes, and a number that grows with every
        block written."""
    def check(self, namespace: str | None = None) -> MediumCheck:
        """Begins a check of the listed blocks, or of those of one namespace."""

@final
class MediumCheck:
    """A check that reads blocks and compares their checksums. A block that fails counts if it fails twice, and no depot has
    dropped it or written to its place in between. What a running depot has written last may count only in the next check."""

    def next(self, limit_bytes: int) -> tuple[int, int, int, list[tuple[str | None, str | None, int, str]]] | None:
        """Reads blocks until they have ``limit_bytes``; ``None`` = the check has ended. Returns the number of blocks that were
        read for the first time, their bytes, all bytes that were read, and what is broken: namespace and hash (``None`` =
        not known), offset, reason.

        Raises:
            KVDepotError: the medium cannot be read any more. What is known by then is incomplete.
        """

def describe_devices(cache_dir: str) -> str:
    """Returns JSON: the CUDA driver, or its problem, and the devices with their copy engines and the measurements of
    them that are kept in ``cache_dir``; ``adapters`` are the RDMA adapters, or ``adapters_problem`` says why there are
    none. Creates no context and measures nothing."""

def bench_copies(
    device: str = "0", cache_dir: str | None = None, *, smoke: bool = False, kernel_blocks: int | None = None
) -> str:
    """Measures every copy engine on a device (number, ``GPU-…`` or PCI bus id), some seconds each, and returns the
    rates as JSON; ``missing`` says why an engine cannot be used here. What the engine ``auto`` measures for itself is
    kept in ``cache_dir``. ``smoke``: small sizes, whose rates mean nothing. ``kernel_blocks``: maximum number of blocks
    of 256 threads that the kernel runs on; ``None`` = 64.

    Raises:
        UnavailableError, UnsupportedError, ConfigError: there is no driver or no such device."""

@final
class Trace:
    """A trace of requests in memory, for replaying it against caches."""

    def __new__(cls) -> Trace: ...
    def push_json(self, line: str, *, later_ms: int = 0) -> None:
        """Adds a request in Mooncake's format, or a session with its own numbering; ``later_ms`` is added to its time.

        Raises:
            ConfigError: the line is neither."""
    def sort(self) -> None:
        """Sorts the requests by time."""
    def counts(self) -> tuple[int, int, int]:
        """Returns the numbers of requests, of blocks that they name, and of distinct blocks."""
    def requests(self) -> list[tuple[int, int, int, list[int]]]:
        """Returns for each request its time in milliseconds, the tokens of prompt and answer, and its blocks, numbered
        in the order of first use."""
    def replay(self, levels_json: str) -> str:
        """Returns what a pool and tiers would have hit, as a JSON object with ``references``, ``hits`` and ``levels``.
        ``levels_json``: a list of ``{"policy", "capacity"}`` in blocks, the pool first; tiers also have ``"write"``
        (``through``, ``second_use``, ``cold``) and ``"promote"``.

        Raises:
            ConfigError: a level is wrong."""
    def fleet(self, fleet_json: str) -> str:
        """Simulates a fleet of nodes, and returns the results of the parts of the trace as a JSON array.

        ``fleet_json``: an object with ``nodes``, ``engines``, ``engine_capacity``, ``levels`` (as for `replay`),
        ``servers``, ``shared`` (a level or null), ``route``, ``copies``, ``changes`` (pairs of a share of the requests and
        ``{"lose_node": n}`` or another change), ``windows`` and ``seed``.

        Raises:
            ConfigError: the object is wrong, or a change names a node, server or tenant that does not exist then."""
    def belady(self, capacity: int) -> int:
        """Returns the blocks of hits under optimal eviction, which knows the future."""

@final
class Recorder:
    """Writes requests into the files of a trace, on its own thread. Keeps the newest files."""

    def __new__(
        cls, directory: str | os.PathLike[str], name: str, *, block_tokens: int, file_bytes: int, files_max: int
    ) -> Recorder:
        """Begins a recording.

        Raises:
            StorageError: no file can be created in the directory."""
    def record(
        self, block_hashes: Sequence[bytes], *, timestamp_ms: int, input_length: int, output_length: int
    ) -> bool:
        """Queues a request to be written later. Returns false if the queue is full and it was dropped. Never waits."""
    def counters(self) -> tuple[int, int, int]:
        """Returns the numbers of requests written, dropped because the queue was full, and lost to errors of the
        disk."""
    def close(self, wait_ms: int = 2000) -> bool:
        """Ends the recording. Returns whether all queued requests were written within ``wait_ms``."""

@final
class Meter:
    """Counts the hits that depots of several sizes, in blocks, and an unlimited one would give; on its own thread."""

    def __new__(cls, policy: str, capacities: Sequence[int]) -> Meter: ...
    def look_up(self, block_hashes: Sequence[bytes]) -> bool:
        """Counts a request for these blocks, which start where the hit in the engine's own cache ends. Returns false if
        the queue is full and the call was dropped."""
    def store(self, block_hashes: Sequence[bytes]) -> bool:
        """Counts that the engine has computed these blocks."""
    def settle(self, wait_ms: int) -> bool:
        """Waits until everything queued so far is counted. Returns false on timeout."""
    def report_json(self) -> str:
        """Returns JSON: blocks ``asked`` for, the hits of an unlimited depot (``ceiling``), ``held`` and ``hits`` of
        each of ``sizes``, and the number of ``dropped`` calls."""

def serve(
    config_json: str,
    socket_path: str,
    *,
    idle_exit_ms: int = 0,
    wire_json: str | None = None,
    take_over: bool = False,
    wait_for_lock: bool = False,
) -> None:
    """Runs a depot that listens at ``socket_path`` until a signal handler raises, or until no client was
    attached for ``idle_exit_ms`` (0 = never). Returns if another depot already serves that socket. ``wire_json`` also
    starts a network listener; then the depot is never idle. Before it returns, it writes blocks that are in no tier yet, for
    at most ``drain_timeout_ms`` of the configuration. A panic in a thread of the depot aborts the process.
    ``take_over``: takes the pool and its blocks over from the depot that serves the socket, which then exits; starts
    with an empty pool if there is none. ``wait_for_lock``: waits until the depot that serves the socket exits;
    ``take_over`` has precedence.

    Raises:
        ConfigError, StorageError: a value is wrong, or a directory cannot be used. With ``take_over`` also when the
            running depot's pool has another size.
        ProtocolError: with ``take_over``, the running depot has another version.
        UnavailableError: another process holds the socket's lock, and no depot answers.
    """

def crc64nvme(data: bytes) -> int: ...
def decode_block(encoding: int, payload: bytes, *, block_bytes: int) -> bytes:
    """Returns the block of this length in the payload of a block file.

    Raises:
        StorageError: the payload is not such a block.
    """

def block_hash(engine_hash: bytes) -> bytes:
    """Returns the 16 bytes that represent an engine's hash in a key."""

def namespace_id(facts_json: str, layout_json: str, *, epoch: int = 0) -> str: ...
def keep_pool() -> None:
    """Runs the keeper process, which holds a depot's pool across a crash. Only a depot starts it, over its standard
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
    """Sends log lines of the core to standard error, or to ``path``; ``level``: error, warn, info, debug, trace.

    ``max_bytes`` bounds the file ``path`` (0 = no bound), and ``max_files`` is the number of files kept, including
    rotated ones. At most ``burst_lines`` lines of one kind are written in ten seconds; 0 = no bound. Only the first
    call in a process has an effect.
    """
