"""LMCache's own storage manager with its ``infinistore://`` connector, in a process of its own.

Run as ``-m tools.wire.lmcache_child URL ACTION FIRST COUNT``. Prints one line of JSON.
"""

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

# Layers, keys and values, tokens of a chunk, heads, elements of a head: 1 MiB of bfloat16.
SHAPE = (4, 2, 256, 4, 64)
CHUNK_TOKENS = SHAPE[2]
STORED = torch.Size([SHAPE[1], SHAPE[0], CHUNK_TOKENS, SHAPE[3] * SHAPE[4]])
PUT_S = 60.0
BACKEND = "RemoteBackend"


def manager(url: str) -> Any:
    """Returns the storage manager of one worker, over the server only: the process itself keeps nothing."""
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS,
        local_cpu=False,
        max_local_cpu_size=0.5,
        remote_url=url,
        remote_serde="naive",
        # A get that takes longer is a miss.
        blocking_timeout_secs=60,
        extra_config={"infinistore_link_type": "LINK_IB"},
    )
    metadata = LMCacheMetadata(
        model_name="model",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=SHAPE,
    )
    return StorageManager(config, metadata, EventManager())


def key(number: int) -> CacheEngineKey:
    """Returns a chunk's key."""
    return CacheEngineKey("model", 1, 0, 0x1234_5678_9ABC_0000 + number, torch.bfloat16)


def content(number: int) -> torch.Tensor:
    """Returns a chunk's values; no two chunks have the same."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(STORED, generator=generator).to(torch.bfloat16)


def store(storage: Any, numbers: list[int]) -> dict[str, Any]:
    """Puts chunks, and waits until the server has them."""
    remote = storage.storage_backends[BACKEND]
    chunks = []
    for number in numbers:
        chunk = storage.allocate(STORED, torch.bfloat16, MemoryFormat.KV_2LTD)
        chunk.tensor.copy_(content(number))
        chunks.append(chunk)
    storage.batched_put([key(number) for number in numbers], chunks)
    end_s = time.monotonic() + PUT_S
    while any(remote.exists_in_put_tasks(key(number)) for number in numbers) and time.monotonic() < end_s:
        time.sleep(0.005)
    waiting = sum(remote.exists_in_put_tasks(key(number)) for number in numbers)
    return {"waiting": waiting, "failed": remote.put_failed_count}


def load(storage: Any, numbers: list[int]) -> dict[str, Any]:
    """Gets chunks, all together and one by one. Reports which are held, whole or wrong."""
    remote = storage.storage_backends[BACKEND]
    at_once = remote.batched_get_blocking([key(number) for number in numbers])
    one_by_one = [remote.get_blocking(key(number)) for number in numbers]
    return {
        "contains": [remote.contains(key(number)) for number in numbers],
        "prefix": remote.batched_contains([key(number) for number in numbers]),
        "at_once": [judge(chunk, number) for chunk, number in zip(at_once, numbers, strict=True)],
        "one_by_one": [judge(chunk, number) for chunk, number in zip(one_by_one, numbers, strict=True)],
    }


def judge(chunk: Any, number: int) -> str:
    """Compares a chunk with its expected content."""
    if chunk is None:
        return "miss"
    return "whole" if torch.equal(chunk.tensor, content(number)) else "wrong"


def main() -> None:
    """Does one action."""
    url, action, first, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    storage = manager(url)
    connected = storage.storage_backends[BACKEND].connection is not None
    # Actions with holes leave out every third chunk.
    numbers = [number for number in range(first, first + count) if action != "store-holes" or number % 3]
    result = (load if action == "load" else store)(storage, numbers) if connected else {}
    print(json.dumps({"connected": connected, **result}), flush=True)
    # Its event loop's thread and its metrics do not end on their own.
    os._exit(0)


if __name__ == "__main__":
    main()
