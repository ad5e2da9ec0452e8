"""kvdepot as an L2 adapter of LMCache's server: ``--l2-adapter`` with type ``plugin``."""

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from kvdepot.engines.lmcache.counters import Counters
from kvdepot.engines.lmcache.facts import Layout, UnknownLayoutError, lmcache_version, namespace_facts
from kvdepot.engines.lmcache.keys import object_hash, object_label
from kvdepot.engines.lmcache.locker import Locker
from kvdepot.engines.lmcache.objects import address_of, layout_of
from kvdepot.engines.lmcache.options import read_params
from kvdepot.engines.lmcache.recent import Recent
from kvdepot.engines.lmcache.stores import Moved, Place, Row, Stores
from kvdepot.engines.lmcache.tasks import StillCopyingError, Tasks
from kvdepot.engines.lmcache.weights import Weights

FACE = "server"
LOOKUP_THREADS = 2
STORE_THREADS = 2
LOAD_THREADS = 4
SEEN_LAYOUTS_MAX = 1024


class KVDepotL2Adapter(L2AdapterInterface):
    """Stores LMCache's objects in the node's depot, which is started if none answers.

    The depot's own eviction decides what stays, so no capacity is reported to LMCache. An object that LMCache deletes
    is a miss in this process until it is stored again. The depot evicts its bytes like those of any unused block.

    A lookup leases what it finds until that was loaded or unlocked, as far as ``Locker`` may. An object that is not
    leased may be evicted between lookup and load; then the load fails, which is a miss.

    Thread safety: LMCache's two controllers may call it concurrently, and any number of other threads.
    """

    def __init__(self, params: Mapping[str, Any] | None = None, l1_memory_desc: Any = None) -> None:  # noqa: ARG002
        """Reads the configuration. The depot is attached with the first objects.

        Args:
            params: ``adapter_params`` of ``--l2-adapter``: keys of the configuration, or ``config``, the name of a
                file.
            l1_memory_desc: LMCache's memory, which needs no registration.

        Raises:
            ConfigError: a key or value is wrong.
        """
        super().__init__()
        self._options = read_params(params)
        self._counters = Counters()
        self._weights = Weights(self._options.weights_version, self._options.config.attach_timeout_ms / 1000)
        self._stores = Stores(self._options.config, self._facts, self._counters)
        self._locker = Locker(self._stores, self._counters, self._options.config.timeout_ms)
        self._lookups: Tasks[Any] = Tasks("lookup", LOOKUP_THREADS, self._counters)
        self._dumps: Tasks[Any] = Tasks("store", STORE_THREADS, self._counters)
        self._loads: Tasks[Any] = Tasks("load", LOAD_THREADS, self._counters)
        self._deleted = Recent()
        self._announced = Recent()
        self._seen: dict[tuple[str, int], Layout] = {}
        lmcache_version()  # refuses an LMCache without a version now rather than with the first object

    def get_store_event_fd(self) -> int:
        """Returns the descriptor that signals finished stores."""
        return self._dumps.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Returns the descriptor that signals finished lookups."""
        return self._lookups.fileno()

    def get_load_event_fd(self) -> int:
        """Returns the descriptor that signals finished loads."""
        return self._loads.fileno()

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Starts storing objects, whose memory LMCache keeps until the task has ended. Returns the task's number."""
        deleted = self._deleted.marks(object_label(keys[number].model_name, name) for number, name in self._names(keys))
        return self._dumps.submit(lambda: self._store(keys, objects, deleted), lambda: L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Returns results of stores that have ended since the last call. A store fails if any of its objects does."""
        return self._dumps.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Starts a lookup of objects, and locks what it finds.

        Args:
            keys: the objects.
            group_layout_descs: their layouts by object group.

        Returns:
            The task's number.
        """
        return self._lookups.submit(lambda: self._look_up(keys, group_layout_descs), lambda: Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Returns which objects the depot has, once; ``None`` while the task runs."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Ends one lock of each of these objects. LMCache unlocks once for each lookup that found them."""
        self._locker.unlock([object_label(keys[number].model_name, name) for number, name in self._names(keys)])

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Starts loading objects into memory that LMCache keeps until the task has ended. Returns the task's number."""
        return self._loads.submit(lambda: self._load(keys, objects), lambda: Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        """Returns which objects were loaded, once; ``None`` while the task runs. Bytes of all others are undefined."""
        return self._loads.take(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Makes objects misses in this process from now on, even if a lookup has already found them."""
        gone, sizes, labels = [], [], []
        for number, name in self._names(keys):
            label = object_label(keys[number].model_name, name)
            self._deleted.mark(label)
            labels.append(label)
            size = self._announced.take(label)
            if size is not None:
                gone.append(keys[number])
                sizes.append(size)
        self._locker.delete(labels)
        self._counters.add("deleted", len(keys))
        if gone:
            self._notify_keys_deleted(gone, sizes)

    def report_status(self) -> dict[str, Any]:
        """Returns the adapter's status for operators. LMCache's server stays healthy without a depot."""
        return {
            "is_healthy": True,
            "type": "kvdepot",
            "attached": self._stores.attached(),
            "pipeline": self._options.config.pipeline,
            "layouts": len(self._stores),
            "deleted_here": len(self._deleted),
            **self._locker.report(),
            "counts": self._counters.snapshot(),
        }

    def close(self) -> None:
        """Waits for tasks in flight, at most ``timeout_ms``, and detaches; queued tasks fail. Idempotent."""
        for tasks in (self._lookups, self._dumps, self._loads):
            tasks.close()
        self._locker.close()
        self._stores.close()

    def _facts(self, layout: Layout) -> Mapping[str, object]:
        return namespace_facts(layout, FACE, self._options.weights_version, self._weights.facts(layout.model))

    def _store(self, keys: list[Any], objects: list[Any], deleted: Mapping[bytes, int]) -> Any:
        places, numbers = self._places(keys, objects, "store")
        moved = self._stores.move("dump", places)
        _refuse_to_end(moved)
        ended = moved.done
        stored, sizes, new, new_sizes = 0, 0, [], []
        for number, (layout, name, _), well in zip(numbers, places, ended, strict=True):
            if not well:
                continue
            self._seen_layout(keys[number], layout)
            label = object_label(layout.model, name)
            if label in deleted:
                # Unless it was deleted again while it was being stored.
                self._deleted.take(label, only=deleted[label])
            stored += 1
            sizes += layout.size_bytes
            self._locker.had(label)
            if label not in self._deleted and self._announced.put(label, layout.size_bytes):
                new.append(keys[number])
                new_sizes.append(layout.size_bytes)
        if new:
            self._notify_keys_stored(new, new_sizes)
        return L2StoreResult(stored == len(keys), sizes)

    def _look_up(self, keys: list[Any], descs: Mapping[int, Any]) -> Any:
        rows: list[Row] = []
        numbers: list[int] = []
        layouts: dict[tuple[str, int], Layout | None] = {}
        for number, name in self._names(keys):
            key = keys[number]
            group = (key.model_name, key.object_group_id)
            if group not in layouts:
                layouts[group] = self._told_layout(group, descs)
            layout = layouts[group]
            if layout is not None and object_label(layout.model, name) not in self._deleted:
                rows.append((layout, name))
                numbers.append(number)
        found = Bitmap(len(keys))
        hits: list[tuple[int, Row]] = []
        missed: list[tuple[Any, Row]] = []
        chunks: Counter[tuple[str, int, int]] = Counter()
        for number, row, there in zip(numbers, rows, self._stores.lookup(rows), strict=True):
            key = keys[number]
            rank = (key.model_name, key.kv_rank, key.object_group_id)
            if there:
                found.set(number)
                hits.append((chunks[rank], row))
            else:
                missed.append((key, row))
            chunks[rank] += 1
        self._counters.add("looked_up", len(keys))
        self._counters.add("found", len(hits))
        # Locks come last: LMCache unlocks nothing after a lookup that has failed, and its listeners may raise.
        self._tell_evicted(missed)
        self._lock(hits)
        return found

    def _lock(self, hits: list[tuple[int, Row]]) -> None:
        """Locks objects, each with the number of its chunk: the first chunks of all ranks and groups come first."""
        hits.sort(key=itemgetter(0))
        self._locker.lock([row for _, row in hits])
        labels = [object_label(layout.model, name) for _, (layout, name) in hits]
        self._locker.delete([label for label in labels if label in self._deleted])

    def _load(self, keys: list[Any], objects: list[Any]) -> Any:
        places, numbers = self._places(keys, objects, "load")
        labels = [object_label(layout.model, name) for layout, name, _ in places]
        wanted = [at for at, label in enumerate(labels) if label not in self._deleted]
        loaded = Bitmap(len(keys))
        came: list[Any] = []
        missed: list[tuple[Any, Row]] = []
        moved = self._stores.move("load", [places[at] for at in wanted])
        _refuse_to_end(moved)
        for at, done, may_be_gone in zip(wanted, moved.done, moved.missed, strict=True):
            key, (layout, name, _) = keys[numbers[at]], places[at]
            # A deletion during the load counts, because LMCache requested it before it had these bytes.
            if done and labels[at] not in self._deleted:
                loaded.set(numbers[at])
                came.append(key)
                self._locker.had(labels[at])
            elif may_be_gone:
                missed.append((key, (layout, name)))
        self._locker.loaded(labels)
        if came:
            self._notify_keys_accessed(came)
        self._tell_evicted(missed)
        return loaded

    def _places(self, keys: Sequence[Any], objects: Sequence[Any], kind: str) -> tuple[list[Place], list[int]]:
        """Returns places and indexes of the objects, except those that cannot be identified."""
        places: list[Place] = []
        numbers: list[int] = []
        if len(keys) != len(objects):
            self._counters.trouble(
                f"{kind}_error", f"LMCache passed {len(keys)} keys with {len(objects)} objects", len(keys)
            )
            return places, numbers
        for number, name in self._names(keys):
            place = self._place(keys[number].model_name, name, objects[number])
            if place is not None:
                places.append(place)
                numbers.append(number)
        return places, numbers

    def _place(self, model: str, name: bytes, memory: Any) -> Place | None:
        try:
            layout = layout_of(memory, model)
            return layout, name, address_of(memory, layout)
        except UnknownLayoutError as error:
            self._counters.trouble("unknown_object", str(error))
            return None

    def _names(self, keys: Sequence[Any]) -> list[tuple[int, bytes]]:
        """Returns indexes and hashes of the keys that have a hash."""
        named = ((number, self._name(key)) for number, key in enumerate(keys))
        return [(number, name) for number, name in named if name is not None]

    def _name(self, key: Any) -> bytes | None:
        try:
            return object_hash(key)
        except UnknownLayoutError as error:
            self._counters.trouble("unknown_key", str(error))
            return None

    def _told_layout(self, group: tuple[str, int], descs: Mapping[int, Any]) -> Layout | None:
        model, number = group
        desc = descs.get(number)
        problem = f"LMCache does not report the layout of {model}'s object group {number}"
        if desc is not None:
            try:
                return Layout.of(model, desc.shapes, desc.dtypes)
            except UnknownLayoutError as error:
                problem = str(error)
        # LMCache's own benchmark reports objects of 0 bytes; the layout of stored objects is used then.
        seen = self._seen.get(group)
        if seen is None:
            self._counters.trouble("unknown_object", problem)
        return seen

    def _seen_layout(self, key: Any, layout: Layout) -> None:
        group = (key.model_name, key.object_group_id)
        if group in self._seen or len(self._seen) < SEEN_LAYOUTS_MAX:
            self._seen[group] = layout

    def _tell_evicted(self, missed: Sequence[tuple[Any, Row]]) -> None:
        """Tells LMCache's accounting which of these objects the depot has evicted.

        A miss is not enough: lookups and loads also miss objects that the depot has, if it or a tier is late. Such an
        object would never be counted again, because LMCache does not store what it finds.
        """
        labelled = ((key, row, object_label(row[0].model, row[1])) for key, row in missed)
        asked = [(key, row, label) for key, row, label in labelled if label in self._announced]
        gone, sizes = [], []
        for (key, _, label), is_gone in zip(asked, self._stores.gone([row for _, row, _ in asked]), strict=True):
            size = self._announced.take(label) if is_gone else None
            if size is not None:
                gone.append(key)
                sizes.append(size)
        if gone:
            self._counters.add("evicted_by_depot", len(gone))
            self._notify_keys_deleted(gone, sizes)


def _refuse_to_end(moved: Moved) -> None:
    if any(moved.copying):
        raise StillCopyingError(f"{sum(moved.copying)} of its objects may still be copied")
