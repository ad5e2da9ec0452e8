"""KV events of a real vLLM, as a router's subscriber gets them: what the depot has, whichever engine stored it."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine_lab import Lab
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

TOKENS = 300
BLOCKS = TOKENS // 32
TINY = [[[99, 8]]]
"""A prompt without a whole block: only its steps count."""

POLL_MS = 100
HANG_S = 240.0
END_OF_REPLAY = ZmqEventPublisher.END_SEQ


class Router:
    """A subscriber that knows from events alone which blocks are where, and touches files when it knows enough.

    It applies batches by their numbers. Those that it missed, such as the first ones, which were published before its
    subscription had reached the engine, it asks for at the replay endpoint, as vLLM intends.
    """

    def __init__(self, endpoint: str, replay: str, goals: dict[Path, Any]) -> None:
        self.blocks: dict[tuple[str, str | None], set[int]] = {}
        self.stored: set[int] = set()
        self.applied = 0
        self.trouble = ""
        self._waiting: dict[int, bytes] = {}
        self._is_asked = False
        self._goals = dict(goals)
        self._end = threading.Event()
        context = zmq.Context.instance()
        self._live = context.socket(zmq.SUB)
        self._live.connect(endpoint)
        self._live.subscribe("kv")
        self._replay = context.socket(zmq.DEALER)
        self._replay.connect(replay)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def at(self, medium: str, owner: str | None = None) -> set[int]:
        return self.blocks.get((medium, owner), set())

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                self._receive()
                while (payload := self._waiting.pop(self.applied, None)) is not None:
                    for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
                        self._apply(event)
                    self.applied += 1
                for file, reached in list(self._goals.items()):
                    if not reached(self):
                        break
                    file.touch()
                    del self._goals[file]
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.trouble = repr(error)

    def _receive(self) -> None:
        poller = zmq.Poller()
        poller.register(self._live, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        ready = dict(poller.poll(POLL_MS))
        if not ready and not self._is_asked:
            self._replay.send_multipart((b"", self.applied.to_bytes(8, "big")))
            self._is_asked = True
        for socket in ready:
            *_, number, payload = socket.recv_multipart()
            if number == END_OF_REPLAY:
                self._is_asked = False
            elif int.from_bytes(number, "big") >= self.applied:
                self._waiting[int.from_bytes(number, "big")] = payload

    def _apply(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            return
        place = (event.medium, event.ownership)
        known = self.blocks.setdefault(place, set())
        if isinstance(event, BlockStored):
            known.update(event.block_hashes)
            if event.medium == "GPU":
                self.stored.update(event.block_hashes)
        else:
            assert isinstance(event, BlockRemoved)
            assert known.issuperset(event.block_hashes) or event.medium == "GPU"
            known.difference_update(event.block_hashes)

    def close(self) -> None:
        self._end.set()
        self._thread.join(HANG_S)
        self._live.close(linger=0)
        self._replay.close(linger=0)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_router_knows_the_depot_s_blocks_by_vllm_s_hashes(real_lab: Lab, tp: int) -> None:
    first, second = [[[1, TOKENS]]], [[[2, TOKENS]]]
    pool, disk = ("CPU", "kvdepot/pool"), ("STORAGE", "kvdepot/posix")
    home = real_lab.short_root()
    socket = str(home / "depot.sock")
    stores = [
        {"do": "generate", "name": "cold", "prompts": first, "max_tokens": 1},
        {"do": "settle", "socket": socket},
    ]
    options = {"socket": socket, "on_reset": "drop"}
    real_lab.run("llama", stores, tp=tp, options=options)

    def both(router: Router, count: int) -> bool:
        return len(router.at(*pool)) == len(router.at(*disk)) == count

    files = [real_lab.root / name for name in ("others", "own", "dropped")]
    goals = {
        # Nothing but what another engine stored; this one computed no whole block.
        files[0]: lambda router: both(router, BLOCKS) and not router.stored,
        files[1]: lambda router: both(router, 2 * BLOCKS) and router.at(*pool) == router.stored,
        files[2]: lambda router: both(router, 0),
    }
    endpoint, replay = f"ipc://{home}/kv", f"ipc://{home}/replay"
    router = Router(endpoint, replay, goals)
    try:
        phases: list[dict[str, Any]] = [
            {"do": "step_until", "prompts": TINY, "file": str(files[0])},
            {"do": "generate", "name": "hit", "prompts": first, "max_tokens": 1},
            {"do": "generate", "name": "cold", "prompts": second, "max_tokens": 1},
            {"do": "step_until", "prompts": TINY, "file": str(files[1])},
            {"do": "reset_all"},
            {"do": "step_until", "prompts": TINY, "file": str(files[2])},
        ]
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": "kv"}
        events["replay_endpoint"] = replay
        run = real_lab.run("llama", phases, tp=tp, options=options, engine={"kv_events_config": events})
    finally:
        router.close()
        print("the router knows", router.blocks, router.trouble)
    assert not router.trouble, router.trouble
    assert run["hit"]["cached"] == [BLOCKS * 32], "the blocks that were told are a hit"
