"""LMCache's own objects and keys with known content, and a driver that calls an L2 adapter as LMCache's server does."""

import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

SHAPE = torch.Size([2, 4, 16, 64])
DTYPE = torch.bfloat16
SIZE = SHAPE.numel() * DTYPE.itemsize
GUARD = 64
"""Guard bytes on either side of an object, which must not be touched."""
END_S = 60.0


def desc(shape: Sequence[int] = SHAPE, dtype: torch.dtype = DTYPE) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([torch.Size(shape)], [dtype])


def key(number: int, **other: Any) -> ObjectKey:
    fields = {"model_name": "model", "kv_rank": ObjectKey.ComputeKVRank(1, 0, 1, 0), **other}
    return ObjectKey(chunk_hash=number.to_bytes(32, "little"), **fields)


def content(number: int, size: int = SIZE) -> torch.Tensor:
    """Returns bytes that no two numbers share."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


class Memory:
    """An object in its own memory, with guards around it."""

    def __init__(self, shape: Sequence[int] = SHAPE, dtype: torch.dtype = DTYPE, fill: torch.Tensor | None = None):
        size = torch.Size(shape).numel() * dtype.itemsize
        self._whole = torch.full((GUARD + size + GUARD,), 0xA5, dtype=torch.uint8)
        self.bytes = self._whole[GUARD : GUARD + size]
        if fill is not None:
            self.bytes.copy_(fill)
        meta = MemoryObjMetadata(
            shape=torch.Size(shape),
            dtype=dtype,
            address=0,
            phy_size=size,
            ref_count=1,
            fmt=MemoryFormat.KV_2LTD,
            shapes=[torch.Size(shape)],
            dtypes=[dtype],
        )
        self.object = TensorMemoryObj(self.bytes, meta, None)

    @property
    def guarded(self) -> bool:
        """Returns whether the guards are unchanged."""
        return bool((self._whole[:GUARD] == 0xA5).all() and (self._whole[-GUARD:] == 0xA5).all())


class Driver:
    """Calls an adapter as LMCache's controllers do: submits, waits for the descriptor, takes the result."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def store(self, numbers: Sequence[int], **other: Any) -> Any:
        kept = [Memory(fill=content(number)) for number in numbers]
        return self.store_objects([key(number, **other) for number in numbers], [one.object for one in kept])

    def store_objects(self, keys: list[ObjectKey], objects: list[Any]) -> Any:
        task = self.adapter.submit_store_task(keys, objects)
        fd = self.adapter.get_store_event_fd()
        return self._result(fd, lambda: self.adapter.pop_completed_store_tasks().get(task))

    def lookup(self, numbers: Sequence[int], layout: MemoryLayoutDesc | None = None, **other: Any) -> list[int]:
        keys = [key(number, **other) for number in numbers]
        descs = {keys[0].object_group_id: layout or desc()}
        task = self.adapter.submit_lookup_and_lock_task(keys, descs)
        fd = self.adapter.get_lookup_and_lock_event_fd()
        found = self._result(fd, lambda: self.adapter.query_lookup_and_lock_result(task))
        return [numbers[index] for index in found.get_indices_list()]

    def unlock(self, numbers: Sequence[int], **other: Any) -> None:
        self.adapter.submit_unlock([key(number, **other) for number in numbers])

    def load(self, numbers: Sequence[int], *, unlock: bool = True, **other: Any) -> dict[int, str]:
        """Loads, then unlocks as LMCache does. Returns ``whole``, ``wrong`` or ``miss`` for each number."""
        memories = [Memory() for _ in numbers]
        keys = [key(number, **other) for number in numbers]
        task = self.adapter.submit_load_task(keys, [one.object for one in memories])
        fd = self.adapter.get_load_event_fd()
        loaded = set(self._result(fd, lambda: self.adapter.query_load_result(task)).get_indices_list())
        if unlock:
            self.adapter.submit_unlock(keys)
        assert all(one.guarded for one in memories)
        assert self.adapter.query_load_result(task) is None, "a result is told once"
        return {
            number: "miss" if index not in loaded else judge(memories[index], number)
            for index, number in enumerate(numbers)
        }

    def _result(self, fd: int, ask: Callable[[], Any]) -> Any:
        end_s = time.monotonic() + END_S
        while (result := ask()) is None:
            readable, _, _ = select.select([fd], [], [], max(0.0, end_s - time.monotonic()))
            assert readable, "the task does not end"
            os.eventfd_read(fd)
        return result


def judge(memory: Memory, number: int) -> str:
    return "whole" if torch.equal(memory.bytes, content(number)) else "wrong"


def until(condition: Callable[[], Any], what: str) -> None:
    """Waits for a condition."""
    end_s = time.monotonic() + END_S
    while not condition():
        assert time.monotonic() < end_s, f"{what}: not within {END_S:.0f} s"
        time.sleep(0.02)
