"""Proof, before the first load, that bytes of the engine's real tensors survive a round trip through the depot.

It covers everything that a later engine or layout may change: the tensors' views, strides, the order of layers, the
registration of their memory and the copies themselves. torch writes and compares where vLLM's own configuration of the
cache places a block's bytes (``placement``), the depot copies by our page arithmetic (``pages``).
"""

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdepot.engines.vllm.compute import ComputeOrder
from kvdepot.engines.vllm.log import connector_logger
from kvdepot.engines.vllm.meta import Blocks
from kvdepot.engines.vllm.options import ConnectorOptions
from kvdepot.engines.vllm.placement import blocks_of, head_bytes
from kvdepot.engines.vllm.shares import ALONE
from kvdepot.engines.vllm.stores import GroupStore, Stored, slices
from kvdepot.errors import KVDepotError

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvdepot import Depot, Task
    from kvdepot.engines.vllm.joint import JointTask

logger = connector_logger()

# Page 0 is vLLM's null block. Two pages are dumped and loaded into two others; one more must stay unchanged.
SOURCE_PAGES, TARGET_PAGES, UNTOUCHED_PAGE = (1, 4), (3, 2), 5


class SelfTestError(RuntimeError):
    """The bytes that came back differ from those that were given."""


def self_test(
    depot: "Depot",
    stores: Mapping[int, GroupStore],
    kv_caches: Mapping[str, "torch.Tensor"],
    kv_cache_config: "KVCacheConfig",
    options: ConnectorOptions,
) -> bool:
    """Dumps and loads a pattern in every group, in a namespace of its own. Returns false if there is no depot.

    No copy may be in flight, and nothing may compute. Nobody else may use the pages, whose content is restored: what
    another connector writes there meanwhile would be lost.

    Raises:
        SelfTestError: a group's bytes did not survive the round trip.
        PlacementError: a layer's tensor is not where vLLM's configuration of the cache has it.
    """
    if not depot.attached:
        return False
    for index, store in stores.items():
        page_count = store.page_count
        if page_count <= UNTOUCHED_PAGE:
            logger.warning("kvdepot: %d blocks are too few for the self-test", page_count)
            return True
        layers = blocks_of(store.layer_names, kv_caches, kv_cache_config, index)
        pages = sorted({*SOURCE_PAGES, *TARGET_PAGES, UNTOUCHED_PAGE})
        kept = [layer[pages].clone() for layer in layers]
        try:
            _round_trip(depot, index, store, layers, options)
        finally:
            for layer, bytes_before in zip(layers, kept, strict=True):
                layer[pages] = bytes_before
    return True


def _round_trip(
    depot: "Depot", index: int, store: GroupStore, layers: list["torch.Tensor"], options: ConnectorOptions
) -> None:
    import torch

    for number, layer in enumerate(layers):
        for page in (*SOURCE_PAGES, *TARGET_PAGES, UNTOUCHED_PAGE):
            generator = torch.Generator().manual_seed(1000 * number + page)
            pattern = torch.randint(0, 256, layer[page].shape, dtype=torch.uint8, generator=generator)
            layer[page] = pattern.to(layer.device)
    expected = [[layer[page].clone() for page in (*SOURCE_PAGES, UNTOUCHED_PAGE)] for layer in layers]
    trial = GroupStore.open(depot, [_on_trial(stored) for stored in store.at_start], options, ALONE)
    try:
        hashes = [os.urandom(16) for _ in SOURCE_PAGES]
        written = ComputeOrder(options.enable_event_sync).point()
        dump = trial.dump(Blocks(hashes, list(SOURCE_PAGES)), written)
        if not _moved(dump, options.timeout_ms):
            _not_stored(index, dump)
            return
        _check_slices(index, trial, layers, hashes, options)
        load = trial.load(Blocks(hashes, list(TARGET_PAGES)), written)
        if not _moved(load, options.timeout_ms):
            _not_stored(index, load)
            return
        for number, layer in enumerate(layers):
            for page, want in zip((*TARGET_PAGES, UNTOUCHED_PAGE), expected[number], strict=True):
                if not torch.equal(layer[page], want):
                    name = store.layer_names[number]
                    raise SelfTestError(
                        f"group {index}, layer {name}, page {page}: the bytes read back differ from those written"
                    )
    finally:
        _forget(depot, trial)


def _on_trial(stored: Stored) -> Stored:
    """Returns the same store in a namespace of its own."""
    facts = {**json.loads(stored.facts), "self_test": os.urandom(8).hex()}
    return Stored(json.dumps(facts, sort_keys=True), stored.pages, stored.heads)


def _check_slices(
    index: int, trial: GroupStore, layers: list["torch.Tensor"], hashes: list[bytes], options: ConnectorOptions
) -> None:
    """Checks that each slice has the bytes of its heads; logs a warning if that cannot be read.

    A round trip through this rank's own pages cannot prove it: a rank that confuses slices writes them back to where
    they were, and only an engine with another number of ranks would compute on the wrong heads.

    Raises:
        SelfTestError: a slice has other bytes.
    """
    import torch

    for heads, part in slices(trial):
        for block_hash, page in zip(hashes, SOURCE_PAGES, strict=True):
            wanted = head_bytes(layers, page, heads, by_layer=trial.shard_count == len(layers))
            found = [torch.empty_like(shard) for shard in wanted]
            # Kernels of a device may still use this memory on behalf of its previous owner.
            ComputeOrder(event_sync=False).point()
            addresses = np.array([[shard.data_ptr()] for shard in found], dtype=np.uint64)
            shards = range(len(found))
            load = part.store.load([block_hash] * len(found), addresses, shards, keep=found)
            if not _moved(load, options.timeout_ms):
                _not_stored(index, load)
                continue
            if not all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)):
                raise SelfTestError(f"group {index}: the slice of KV heads {heads} has other bytes than those heads")


def _moved(task: "Task | JointTask", timeout_ms: int) -> bool:
    """Returns whether everything was copied, once nothing touches the pages any more.

    After this they are restored and belong to the engine: a pattern written then would be served as KV. So the wait is
    bounded only by the task's own end (P1).
    """
    if not task.wait_done(timeout_ms):
        logger.warning("kvdepot: a copy of the self-test has not completed after %d ms: waiting for it", timeout_ms)
        task.wait_done()
    return task.result().ok


def _not_stored(index: int, task: Any) -> None:
    """Logs an unfinished test: a full or slow depot proves nothing about the layout; later blocks are tried (P2)."""
    logger.warning("kvdepot: the self-test of group %d could not be completed: %s", index, task.result().failures)


def _forget(depot: "Depot", trial: GroupStore) -> None:
    try:
        depot.reset(trial.namespaces)
    except KVDepotError as error:
        logger.debug("kvdepot: the self-test's blocks remain until they are evicted: %s", error)
    trial.close()
