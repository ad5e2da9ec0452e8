"""``kvdepot events --publish`` beside a real vLLM: its batches are vLLM's, and so are the hashes of the blocks."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
from engine_lab import Lab
from test_events import BLOCKS, TINY, TOKENS, Router
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

HANG_S = 240.0
POLL_MS = 10_000


@contextmanager
def publisher(*options: str) -> Iterator[dict[str, Any]]:
    """Runs the command, and yields what it says at its start."""
    command = [sys.executable, "-m", "kvdepot", "events", "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()
            process.communicate(timeout=HANG_S)
    assert process.returncode == 0


def asked(replay: str) -> list[KVEventBatch]:
    """Returns what a subscriber that has nothing is answered, decoded by vLLM's classes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(replay)
        socket.send_multipart((b"", bytes(8)))
        batches: list[KVEventBatch] = []
        following = None
        while socket.poll(POLL_MS):
            nothing, topic, number, payload = socket.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return batches
            assert (nothing, topic) == (b"", b"kv@node@llama")
            assert following in (None, int.from_bytes(number, "big"))
            following = int.from_bytes(number, "big") + 1
            batches.append(msgspec.msgpack.decode(payload, type=KVEventBatch))
    return []


def contents(batches: list[KVEventBatch]) -> dict[tuple[str | None, str | None, str | None], set[Any]]:
    blocks: dict[tuple[str | None, str | None, str | None], set[Any]] = {}
    for batch in batches:
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                blocks.clear()
                continue
            place = (event.medium, event.locality, event.ownership)
            assert event.group_idx is None
            if isinstance(event, BlockStored):
                blocks.setdefault(place, set()).update(event.block_hashes)
            else:
                assert isinstance(event, BlockRemoved)
                blocks[place].difference_update(event.block_hashes)
    return blocks


def until(replay: str, is_it: Callable[[Any], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not is_it(found := contents(asked(replay))):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_a_publisher_tells_the_hashes_that_vllm_tells(real_lab: Lab) -> None:
    home = real_lab.short_root()
    socket, replay = str(home / "depot.sock"), f"ipc://{home}/own-replay"
    told = real_lab.root / "told"
    goals: dict[Path, Any] = {told: lambda router: len(router.stored) == BLOCKS}
    router = Router(f"ipc://{home}/kv", f"ipc://{home}/replay", goals)
    options = ("--publish", f"ipc://{home}/own", "--replay", replay, "--topic", "kv@node@llama", "--socket", socket)
    try:
        with publisher(*options) as started:
            assert started["status"] == "publishing"
            events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{home}/kv", "topic": "kv"}
            events["replay_endpoint"] = f"ipc://{home}/replay"
            phases: list[dict[str, Any]] = [
                {"do": "generate", "name": "cold", "prompts": [[[1, TOKENS]]], "max_tokens": 1},
                {"do": "step_until", "prompts": TINY, "file": str(told)},
                {"do": "settle", "socket": socket},
            ]
            real_lab.run("llama", phases, options={"socket": socket}, engine={"kv_events_config": events})
            # The engine is gone, and nobody else publishes what the depot has.
            wanted = {
                ("CPU", "LOCAL", "kvdepot/pool"): router.stored,
                ("STORAGE", "LOCAL", "kvdepot/posix"): router.stored,
            }
            until(replay, lambda found: found == wanted)
    finally:
        router.close()
    assert not router.trouble, router.trouble
