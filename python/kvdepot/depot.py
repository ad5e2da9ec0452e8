"""One attachment to a depot for many namespaces: ``kvdepot.attach``, and the ``Depot`` that it returns."""

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from typing_extensions import Self

from kvdepot import _native
from kvdepot.absence import tell_if_absent
from kvdepot.config import ConfigSource, KVDepotConfig, load_config
from kvdepot.errors import ConfigError, UnavailableError
from kvdepot.layout import BlockLayout
from kvdepot.logs import set_up_logging
from kvdepot.node import connect
from kvdepot.store import Store

logger = logging.getLogger("kvdepot")


def attach(config: ConfigSource = None, *, engine_id: str | None = None, block_bytes: int | None = None) -> "Depot":
    """Attaches to a depot inside this process or, with ``mode: node``, to the node's own depot.

    A node depot is started if none answers, unless ``start_depot`` is false. Either way the call waits up to
    ``attach_timeout_ms`` for a depot. Until one answers, every block is a miss; the logger ``kvdepot`` says so, and why
    the depot that was started has ended.

    Args:
        config: path of a YAML file, dict, ``KVDepotConfig``, or ``None`` for defaults sized to the machine.
        engine_id: distinguishes this engine from others when ``share_depot`` is false and ``mode`` is ``node``.
            Defaults to the process id.
        block_bytes: bytes of the largest block; required only for a ``Staging`` pool that is sized in blocks.

    Returns:
        The attachment. Close it, or use it as a context manager.

    Raises:
        ConfigError: the configuration is wrong.
        StorageError: a directory cannot be used.
        ProtocolError: another service, or another version of kvdepot, answers on the node's socket.
    """
    config = load_config(config, owns_pool=False)
    set_up_logging(config)
    if config.mode != "node":
        return Depot(config, _native.Depot.embedded(config.to_core_json(block_bytes)))
    socket = config.socket_path(block_bytes, suffix=engine_id or str(os.getpid()))
    began_s = time.monotonic()
    native = connect(config, socket, block_bytes, config.attach_timeout_ms)
    tell_if_absent(native, config, socket, time.monotonic() - began_s, logger)
    return Depot(config, native)


@dataclass(frozen=True)
class Hit:
    """How far a claim is.

    Attributes:
        settled: whether this is the final hit: its blocks are verified, in the pool and leased.
        units: leading hashes that are a hit, those that were skipped included; final once settled.
        units_from_tier: those of them that came from below the pool.
    """

    settled: bool
    units: int
    units_from_tier: int


@dataclass(frozen=True)
class Group:
    """Blocks that a hit needs together: of a KV-cache group, or of a pool of pages.

    Attributes:
        stores: one store for each rank; the hit needs the blocks of all of them.
        window_blocks: number of last blocks of the hit that are needed, as for sliding windows; 0 = all blocks.
        hashes_per_block: hashes that one block covers, if other groups have smaller blocks.
    """

    stores: Sequence[Store]
    window_blocks: int = 0
    hashes_per_block: int = 1


@dataclass(frozen=True)
class TierReads:
    """Blocks that came from a tier for a claim.

    Attributes:
        tier: name of the tier.
        blocks: number of blocks.
        first_ns, last_ns: when the first and the last of them were there, in nanoseconds before the release.
    """

    tier: str
    blocks: int
    first_ns: int
    last_ns: int


@dataclass(frozen=True)
class ClaimTimes:
    """When a claim got how far at the depot, in nanoseconds before its release. A claim that was made anew began then.

    Attributes:
        opened_ns: it was opened.
        admitted_ns: the depot knew the hit and had room for all of it; ``None`` = that did not happen.
        settled_ns: the hit was final; ``None`` = that did not happen.
        queued: whether it waited for room.
        tiers: what came for it from each tier.
    """

    opened_ns: int
    admitted_ns: int | None
    settled_ns: int | None
    queued: bool
    tiers: tuple[TierReads, ...]


class Claim:
    """A hit that is being prepared. Its blocks are fetched from the tiers into the pool, and stay there until released.

    A claim that is not polled for the depot's ``timeout_ms`` loses its leases; the next poll makes it anew. On a depot
    that is dead or hangs, a claim settles with no hit. Use it as a context manager, or release it.
    """

    def __init__(self, native: _native.Claim) -> None:
        self._native = native

    def poll(self) -> Hit:
        """Returns how far the claim is. Never waits, so it can be called in an engine's step."""
        return Hit(*self._native.poll())

    def wait(self, timeout_ms: int) -> Hit:
        """Polls until the claim has settled, or until the time has passed."""
        return Hit(*self._native.wait(timeout_ms))

    def settle(self) -> Hit:
        """Settles the claim with the blocks that have arrived so far, because the rest is not worth waiting for."""
        return Hit(*self._native.decline())

    def release(self, *, tell_times: bool = False) -> ClaimTimes | None:
        """Drops the leases. Idempotent. Loads that have begun keep leases of their own.

        Args:
            tell_times: whether to return when the claim got how far, for traces.

        Returns:
            The times, if they were asked for and a depot still held the claim; else ``None``.
        """
        told = self._native.release(tell_times=tell_times)
        if told is None:
            return None
        opened_ns, admitted_ns, settled_ns, queued, tiers = told
        return ClaimTimes(opened_ns, admitted_ns, settled_ns, queued, tuple(TierReads(*reads) for reads in tiers))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Depot:
    """An attachment to a depot. Created by ``kvdepot.attach``.

    It carries many namespaces, of any models and block sizes. Each is opened as a ``Store``; closing one leaves the
    others as they are. A process can have 2,048 different namespaces open at a time. Any number of threads may use it
    concurrently.

    Processes: an attachment belongs to the process that made it. In a forked child, calls raise ``UnavailableError``,
    and ``close`` does nothing.
    """

    def __init__(self, config: KVDepotConfig, native: _native.Depot) -> None:
        self._config = config
        self._native = native
        self._stores: weakref.WeakSet[Store] = weakref.WeakSet()
        self._uses: dict[object, str] = {}
        """The canonical description of each open store's namespace, by a token of the store."""
        self._lock = threading.RLock()
        """A signal's handler, or the collection of garbage, may close a store while its thread holds it."""
        self._pid = os.getpid()
        self._closed = False

    @property
    def config(self) -> KVDepotConfig:
        """Configuration that it was attached with."""
        return self._config

    @property
    def attached(self) -> bool:
        """Whether calls currently reach a depot."""
        return self._native.attached

    @property
    def trouble(self) -> str:
        """Why no depot is attached, as far as is known. Empty while one is."""
        return self._native.trouble

    def open(
        self,
        *,
        layout: BlockLayout | Iterable[int],
        namespace: Mapping[str, object],
        cuda_device: int | None = None,
    ) -> Store:
        """Opens a namespace, also while no depot is attached.

        Args:
            layout: how a block is cut: a ``BlockLayout``, or the tensor sizes in bytes of a block with a single shard.
            namespace: everything that changes a block's bytes and is not in the layout: model, revision, dtype,
                rank, salt … (P8). Text, integers, booleans, lists and dicts; no fractions. Stores with different
                facts never read each other's blocks.
            cuda_device: number of the CUDA device that holds the tensors to store and load, as this process counts
                devices; ``None`` = host memory. Tasks are not ordered with the device's streams: synchronise before
                ``dump``, and wait for a load before the device uses its tensors.

        Returns:
            The store. Close it when it is not needed any more; the attachment stays.

        Raises:
            ConfigError: the layout or namespace is wrong.
            UnavailableError, UnsupportedError: the device does not exist, or has no driver.
            UnavailableError: the attachment is closed.
        """
        layout = BlockLayout.of(layout)
        opened = self._native.open_namespace(facts_json(namespace), layout.to_json())
        use = object()
        with self._lock:
            self._uses[use] = opened.canonical
        try:
            copy_json = self._config.copy_json(cuda_device)
            # It opens the namespace again if its last store was closed in the meantime.
            native = self._native.store(opened, timeout_ms=self._config.timeout_ms, copy_json=copy_json)
        except BaseException:
            self._end_use(opened, use)
            raise
        store = Store(self._config, layout, self._native, native, cuda_device)
        store.on_close = partial(self._end_use, opened, use)
        with self._lock:
            if not self._closed:
                self._stores.add(store)
                return store
        store.close()
        raise UnavailableError("the depot was closed: attach again")

    def _end_use(self, namespace: _native.Namespace, use: object) -> None:
        """Ends one store's use of a namespace; again is no error. After the last one, the depot may forget it."""
        with self._lock:
            ended = self._uses.pop(use, None) is not None
            if ended and namespace.canonical not in self._uses.values():
                # A closed attachment has none open.
                with suppress(UnavailableError):
                    self._native.close_namespace(namespace)

    def claim(
        self,
        groups: Sequence[Group | Store],
        hashes: Sequence[bytes],
        *,
        skip: int = 0,
        limit: int | None = None,
        label: str = "",
    ) -> Claim:
        """Claims the longest prefix of ``hashes`` of which all groups have what they need, and leases it.

        Between a lookup and a load a block may be evicted; a claim's blocks cannot be. Load them with the stores'
        ``load``, then release the claim.

        Args:
            groups: what the hit consists of; a ``Store`` stands for a group of its own that needs all blocks.
            hashes: the request's chained hashes.
            skip: leading hashes that the caller already has, a multiple of every ``hashes_per_block``.
            limit: longest hit to return, in hashes; ``None`` = all.
            label: what the caller calls the request, for ``kvdepot why``; the depot keeps its first 96 characters.

        Returns:
            The claim, which may not have settled yet. A failure of the depot is a claim with no hit, and no exception.

        Raises:
            ConfigError: there is no group, a group has no store, a number is out of range, or a hash is not 1 to 64
                bytes long.
            UnavailableError: a store is closed.
        """
        wanted = [group if isinstance(group, Group) else Group([group]) for group in groups]
        limit = len(hashes) if limit is None else limit
        check_claim(wanted, len(hashes), skip, limit)
        spaces = [
            ([store.native_namespace for store in group.stores], group.window_blocks, group.hashes_per_block)
            for group in wanted
        ]
        return Claim(self._native.claim(spaces, hashes, skip=skip, limit=limit, label=label))

    def reset(self, stores: Iterable[Store]) -> None:
        """Makes every block dumped so far in these namespaces unreachable, in every tier, for everyone.

        Raises:
            UnavailableError, DepotTimeoutError: the depot did not confirm the reset.
        """
        self._native.reset([store.native_namespace for store in stores])

    def drain(self, timeout_ms: int) -> bool:
        """Waits until everything dumped so far is written to the tiers. Returns false on timeout.

        Raises:
            UnavailableError, DepotTimeoutError: no depot answers.
        """
        return self._native.drain(timeout_ms)

    def stats(self) -> dict[str, Any]:
        """Returns counters and gauges of the depot and of this process's attachment."""
        stats: dict[str, Any] = json.loads(self._native.stats_json())
        return stats

    def close(self) -> None:
        """Closes the stores that are still open, as ``Store.close`` does, and detaches. Idempotent."""
        if os.getpid() != self._pid:
            return  # another thread may have held a lock at the fork
        with self._lock:
            self._closed = True
            stores = list(self._stores)
        for store in stores:
            store.close()
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_claim(groups: Sequence[Group], hashes: int, skip: int, limit: int) -> None:
    """Checks what a claim asks for.

    Raises:
        ConfigError: a number is out of range, or a group has no stores.
    """
    if not groups:
        raise ConfigError("groups: there must be a group")
    for group in groups:
        if not group.stores or not all(isinstance(store, Store) for store in group.stores):
            raise ConfigError("groups: each group needs a store, and nothing but stores")
        if group.window_blocks < 0 or group.hashes_per_block < 1:
            raise ConfigError(
                "groups: window_blocks must be 0 or more, and hashes_per_block 1 or more, got "
                f"{group.window_blocks} and {group.hashes_per_block}"
            )
        if skip % group.hashes_per_block:
            raise ConfigError(f"skip: must be a multiple of hashes_per_block, {group.hashes_per_block}, got {skip}")
    if not 0 <= skip <= hashes:
        raise ConfigError(f"skip: must be between 0 and the number of hashes, {hashes}, got {skip}")
    if limit < 0:
        raise ConfigError(f"limit: must be 0 or more, got {limit}")


def facts_json(namespace: Mapping[str, object]) -> str:
    """Returns the facts of a namespace as JSON.

    Raises:
        ConfigError: there are none, or one has no JSON.
    """
    if not namespace:
        raise ConfigError(
            "namespace: must describe everything that changes the blocks' bytes, such as {'model': ..., 'dtype': ...}"
        )
    try:
        return json.dumps(namespace, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"namespace: must be text, integers, booleans, lists and dicts: {error}") from error


def open_store(
    config: ConfigSource = None,
    *,
    layout: BlockLayout | Iterable[int],
    namespace: Mapping[str, object],
    engine_id: str | None = None,
    cuda_device: int | None = None,
) -> Store:
    """Opens a store with an attachment of its own: ``attach``, then ``Depot.open``.

    A program with several namespaces, models or block sizes attaches once and opens a store for each.

    Args:
        config: as for ``attach``.
        layout: as for ``Depot.open``.
        namespace: as for ``Depot.open``.
        engine_id: as for ``attach``.
        cuda_device: as for ``Depot.open``.

    Returns:
        The store. Closing it closes the attachment, too. Use it as a context manager, or close it.

    Raises:
        ConfigError: the configuration, layout or namespace is wrong.
        StorageError: a directory cannot be used.
        UnavailableError, UnsupportedError: the device does not exist, or has no driver.
        ProtocolError: another service, or another version of kvdepot, answers on the node's socket.
    """
    layout = BlockLayout.of(layout)
    # Before anything is started.
    facts_json(namespace)
    depot = attach(config, engine_id=engine_id, block_bytes=layout.block_bytes)
    try:
        store = depot.open(layout=layout, namespace=namespace, cuda_device=cuda_device)
    except BaseException:
        depot.close()
        raise
    store.owns_attachment = True
    return store
