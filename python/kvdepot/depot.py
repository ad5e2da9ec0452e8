"""One attachment to a depot for many namespaces: ``kvdepot.attach``, and the ``Depot`` that it returns."""

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from typing_extensions import Self

from kvdepot import _native
from kvdepot.absence import tell_if_absent
from kvdepot.claim import Claim, Group, checked_groups, native_namespaces
from kvdepot.config import ConfigSource, KVDepotConfig, load_config
from kvdepot.errors import ConfigError, UnavailableError
from kvdepot.follower import Follower
from kvdepot.layout import BlockLayout
from kvdepot.logs import set_up_logging
from kvdepot.namespace import Namespace, facts_json
from kvdepot.node import connect
from kvdepot.store import Store

logger = logging.getLogger("kvdepot")


def attach(
    config: ConfigSource = None,
    *,
    engine_id: str | None = None,
    block_bytes: int | None = None,
    wait_ms: int | None = None,
    tell_absence: bool = True,
) -> "Depot":
    """Attaches to a depot inside this process or, with ``mode: node``, to the node's own depot.

    A node depot is started if none answers, unless ``start_depot`` is false. Either way the call waits for a depot.
    Until one answers, every block is a miss; the logger ``kvdepot`` says so, and why the depot that was started has
    ended.

    Args:
        config: path of a YAML file, dict, ``KVDepotConfig``, or ``None`` for defaults sized to the machine.
        engine_id: distinguishes this engine from others when ``share_depot`` is false and ``mode`` is ``node``.
            Defaults to the process id.
        block_bytes: bytes of the largest block; required only for a ``Staging`` pool that is sized in blocks.
        wait_ms: how long to wait for a node depot; ``None`` = ``attach_timeout_ms``.
        tell_absence: whether to log that no depot answers. A caller that passes false has ``Depot.attached`` and
            ``Depot.trouble`` for messages of its own.

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
    socket = config.socket_path(block_bytes, suffix=str(os.getpid()) if engine_id is None else engine_id)
    began_s = time.monotonic()
    native = connect(config, socket, block_bytes, config.attach_timeout_ms if wait_ms is None else wait_ms)
    if tell_absence:
        tell_if_absent(native, config, socket, time.monotonic() - began_s, logger)
    return Depot(config, native)


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
        """The canonical description of each open ``Namespace``, by a token of it."""
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
        namespace: Mapping[str, object] | Namespace,
        layout: BlockLayout | Iterable[int] | None = None,
        cuda_device: int | None = None,
        timeout_ms: int | None = None,
    ) -> Store:
        """Opens a store for the blocks of a namespace, also while no depot is attached.

        Args:
            namespace: everything that changes a block's bytes and is not in the layout, as for ``open_namespace``. Or a
                namespace from there, which stays open when the store is closed.
            layout: how a block is cut, as for ``open_namespace``; ``None`` with a ``Namespace``, which has its own.
            cuda_device: number of the CUDA device that holds the tensors or pages to store and load, as this process
                counts devices; ``None`` = host memory. A task over tensors begins after what torch's current stream
                had to do, and one over addresses after its ``wait_event``. Wait for a load before the device uses what
                it fills.
            timeout_ms: time limit of each task; ``None`` = that of the configuration.

        Returns:
            The store. Close it when it is not needed any more; the attachment stays.

        Raises:
            ConfigError: the layout or namespace is wrong.
            UnavailableError, UnsupportedError: the device does not exist, or has no driver.
            UnavailableError: the attachment is closed.
        """
        owned = not isinstance(namespace, Namespace)
        opened = namespace if isinstance(namespace, Namespace) else self.open_namespace(namespace, layout=layout)
        timeout_ms = self._config.timeout_ms if timeout_ms is None else timeout_ms
        try:
            copy_json = self._config.copy_json(cuda_device)
            # It opens the namespace again if its last store was closed in the meantime.
            native = self._native.store(opened.native, timeout_ms=timeout_ms, copy_json=copy_json)
            store = Store(
                self._config,
                opened,
                self._native,
                native,
                cuda_device=cuda_device,
                timeout_ms=timeout_ms,
                owns_namespace=owned,
            )
        except BaseException:
            if owned:
                opened.close()
            raise
        with self._lock:
            if not self._closed:
                self._stores.add(store)
                return store
        store.close()
        raise UnavailableError("the depot was closed: attach again")

    def open_namespace(
        self, namespace: Mapping[str, object] | str, *, layout: BlockLayout | Iterable[int] | None = None
    ) -> Namespace:
        """Opens a namespace without a store, for claims, resets and events; also while no depot is attached.

        Args:
            namespace: everything that changes a block's bytes and is not in the layout: model, revision, dtype, rank,
                salt … (P8). Text, integers, booleans, lists and dicts; no fractions. Stores with different facts never
                read each other's blocks. Or the text of ``Namespace.description``, usually from another process.
            layout: how a block is cut: a ``BlockLayout``, or the tensor sizes in bytes of a block with a single shard;
                ``None`` with a description, which has it.

        Returns:
            The namespace. Close it when it is not needed any more.

        Raises:
            ConfigError: the layout or the facts are wrong.
            CorruptError: the text is no description.
            UnavailableError: the attachment is closed.
        """
        if isinstance(namespace, str):
            return self._begin_use(self._native.open_canonical(namespace))
        if layout is None:
            raise ConfigError("layout: facts need a layout beside them")
        layout = BlockLayout.of(layout)
        return self._begin_use(self._native.open_namespace(facts_json(namespace), layout.to_json()), layout)

    def _begin_use(self, native: _native.Namespace, layout: BlockLayout | None = None) -> Namespace:
        use = object()
        with self._lock:
            self._uses[use] = native.canonical
        return Namespace(native, partial(self._end_use, native, use), layout)

    def _end_use(self, namespace: _native.Namespace, use: object) -> None:
        """Ends one use of a namespace; again is no error. After the last one, the depot may forget it."""
        if os.getpid() != self._pid:
            return  # another thread may have held the lock at the fork
        with self._lock:
            ended = self._uses.pop(use, None) is not None
            # Detaching ends all uses.
            if ended and not self._closed and namespace.canonical not in self._uses.values():
                # A closed attachment has none open.
                with suppress(UnavailableError):
                    self._native.close_namespace(namespace)

    def claim(
        self,
        groups: Sequence[Group | Store | Namespace],
        hashes: Sequence[bytes],
        *,
        skip: int = 0,
        limit: int | None = None,
        tiers: Sequence[str] | None = None,
        label: str = "",
    ) -> Claim:
        """Claims the longest prefix of ``hashes`` of which all groups have what they need, and leases it.

        Between a lookup and a load a block may be evicted; a claim's blocks cannot be. Load them with the stores'
        ``load``, then release the claim.

        Args:
            groups: what the hit consists of; a ``Store`` or ``Namespace`` stands for a group of its own that needs all
                blocks.
            hashes: the request's chained hashes.
            skip: leading hashes that the caller already has, a multiple of every ``hashes_per_block``.
            limit: longest hit to return, in hashes; ``None`` = all.
            tiers: names of the tiers that blocks may come from, as in the depot's ``pipeline``; ``None`` = all,
                ``()`` = none. What is in the pool counts in any case.
            label: what the caller calls the request, for ``kvdepot why``; the depot keeps its first 96 characters.

        Returns:
            The claim, which may not have settled yet. A failure of the depot is a claim with no hit, and no exception.

        Raises:
            ConfigError: there is no group, a group has no store, a number is out of range, a hash is not 1 to 64 bytes
                long, or the depot has no such tier.
            UnavailableError: a store is closed.
        """
        limit = len(hashes) if limit is None else limit
        spaces = checked_groups(groups, len(hashes), skip, limit)
        if isinstance(tiers, str):
            raise ConfigError(f"tiers: must be several names or none, got {tiers!r}")
        return Claim(self._native.claim(spaces, hashes, skip=skip, limit=limit, tiers=tiers, label=label))

    def reset(self, stores: Iterable[Store | Namespace]) -> None:
        """Makes every block dumped so far in these namespaces unreachable, in every tier, for everyone.

        Raises:
            UnavailableError, DepotTimeoutError: the depot did not confirm the reset.
        """
        self._native.reset(native_namespaces(list(stores)))

    def follow(self, groups: Sequence[Sequence[Store | Namespace]] | None = None) -> Follower:
        """Follows which blocks can be read where, on a thread of the core; also while no depot is attached.

        Args:
            groups: the stores or namespaces of each group; a block counts for a group when all of them have it.
                ``None`` = every namespace of the depot, each as a group of its own.

        Returns:
            What takes the changes. Close it when it is not needed any more.

        Raises:
            UnavailableError: a store or the attachment is closed.
        """
        wanted = None if groups is None else [native_namespaces(group) for group in groups]
        return Follower(self._native.follow(wanted))

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
            if not store.closed:
                store.close()
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
