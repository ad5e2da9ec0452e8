"""``kvdepot events --publish`` with real sockets: what routers know of a depot, whenever they join and whoever dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from click.testing import CliRunner
from node import NodeDepot

import kvdepot
from kvdepot.cli import main
from kvdepot.errors import ConfigError, UnavailableError
from kvdepot.events import BlockEvent
from kvdepot.publish.contents import Contents
from kvdepot.publish.publisher import Publisher
from kvdepot.publish.replays import ANSWERS_MAX
from kvdepot.publish.sockets import END_SEQUENCE, Sockets, endpoint
from kvdepot.publish.stream import BLOCKS_PER_EVENT, Batch, EventStream
from kvdepot.publish.wire import BatchEncoder
from tools.lab.ports import free_port

HANG_S = 100.0
POLL_MS = 20
QUIET_POLLS = 25
"""Number of polls without a message after which a router asks whether it has missed something."""
BYTES = 4096
TOPIC = "kv@node@model"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeDepot]:
    with NodeDepot(tmp_path).with_files(tmp_path / "blocks") as depot:
        yield depot


def dump(store: kvdepot.Store, *numbers: int) -> None:
    blocks = [[np.full(BYTES, number % 256, dtype=np.uint8)] for number in numbers]
    store.dump([number.to_bytes(16, "big") for number in numbers], blocks).wait().raise_for_failures()
    assert store.drain(60_000)


class Router:
    """A subscriber that applies batches in the order of their numbers, and asks for those that it misses.

    It also asks when it has received nothing for a while. A batch can be published after the answer to the first
    request and before the subscription has reached the publisher; only the next batch would show that it is missing.
    """

    def __init__(self, publish: str, replay: str | None = None) -> None:
        self.blocks: set[tuple[str, int]] = set()
        self.next: int | None = None
        self._quiet_polls = 0
        self._waiting: dict[int, bytes] = {}
        self._answer: list[tuple[int, bytes]] | None = None
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.connect(publish)
        self._live.subscribe("kv@")
        self._replay = self._context.socket(zmq.DEALER) if replay else None
        if self._replay is not None:
            self._replay.connect(replay)
            self._ask(0)

    def at(self, place: str) -> set[int]:
        return {number for where, number in self.blocks if where == f"kvdepot/{place}"}

    def until(self, is_it: Callable[["Router"], bool]) -> None:
        deadline = time.monotonic() + HANG_S
        while not is_it(self):
            assert time.monotonic() < deadline, (self.next, self.blocks)
            self._receive()

    def _ask(self, start: int) -> None:
        assert self._replay is not None
        self._answer = []
        self._quiet_polls = 0
        self._replay.send_multipart((b"", start.to_bytes(8, "big")))

    def _receive(self) -> None:
        poller = zmq.Poller()
        poller.register(self._live, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        ready = dict(poller.poll(POLL_MS))
        self._quiet_polls = 0 if ready else self._quiet_polls + 1
        if self._live in ready:
            topic, number, payload = self._live.recv_multipart()
            assert topic == TOPIC.encode()
            self._waiting[int.from_bytes(number, "big")] = payload
        if self._replay is not None and self._replay in ready:
            nothing, topic, number, payload = self._replay.recv_multipart()
            assert (nothing, self._answer is None) == (b"", False)
            if number == END_SEQUENCE:
                assert (topic, payload) == (b"", b"")
                self._applied(self._answer or [])
                self._answer = None
            else:
                assert topic == TOPIC.encode()
                assert self._answer is not None
                self._answer.append((int.from_bytes(number, "big"), payload))
        if self._answer is None:
            self._apply_live()
        if self._answer is None and self._replay is not None and self._quiet_polls >= QUIET_POLLS:
            self._ask(self.next or 0)

    def _apply_live(self) -> None:
        for number in sorted(self._waiting):
            if self._replay is None or number == self.next:
                self._apply(number, self._waiting.pop(number))
            elif self.next is not None and number < self.next:
                del self._waiting[number]
            else:
                self._ask(self.next or 0)
                return

    def _applied(self, answer: list[tuple[int, bytes]]) -> None:
        for at, (number, payload) in enumerate(answer):
            assert number >= (self.next or 0)
            assert not at or number == self.next, "a gap in an answer"
            self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        self.next = number + 1
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
                continue
            for one in event["block_hashes"]:
                entry = (event["ownership"], one)
                (self.blocks.add if event["type"] == "BlockStored" else self.blocks.discard)(entry)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> "Router":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Command:
    """A running ``kvdepot events --publish --json``."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "kvdepot", "events", "--json", "--topic", TOPIC, *options]
        # A handler, unlike a signal that is ignored, is not inherited: background jobs of a shell ignore SIGINT.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        signal.signal(signal.SIGINT, before)
        self.started = self.says("publishing")

    def says(self, status: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            if said["status"] == status:
                return said
        raise AssertionError(f"it ended without {status!r}: {self.process.communicate(timeout=HANG_S)}")

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        assert self.says("ended")["batches"] >= 2
        _, errors = self.process.communicate(timeout=HANG_S)
        assert (self.process.returncode, errors) == (0, "")


@contextmanager
def publishing(*options: str) -> Iterator[Command]:
    command = Command(*options)
    with command.process:
        try:
            yield command
        finally:
            command.process.kill()


def test_routers_know_what_a_depot_has(node: NodeDepot) -> None:
    with node.open([BYTES], {"model": "m"}) as store:
        dump(store, 1, 2)
        local = ("--publish", "tcp://127.0.0.1:0", "--bind", "--replay", "tcp://127.0.0.1:0", "--buffer-batches", "2")
        with publishing(*local, "--socket", node.config["socket"]) as command:
            assert command.started["topic"] == TOPIC
            assert command.says("namespace")["namespace"] == store.namespace_id
            assert command.says("contents")["blocks"] == {"pool": 2, "posix": 2}
            endpoints = command.started["publish"], command.started["replay"]
            with Router(*endpoints) as first, Router(*endpoints) as late:
                first.until(lambda router: router.at("pool") == {1, 2} == router.at("posix"))
                dump(store, 3)
                first.until(lambda router: router.at("pool") == {1, 2, 3} == router.at("posix"))
                for number in range(4, 14):
                    dump(store, number)
                late.until(lambda router: router.at("pool") == {*range(1, 14)} == router.at("posix"))
                store.reset()
                dump(store, 20)
                for router in (first, late):
                    router.until(lambda router: router.at("pool") == {20} == router.at("posix"))
            command.end(signal.SIGTERM)


def test_a_depot_that_dies_and_comes_back(node: NodeDepot, tmp_path: Path) -> None:
    publish, replay = f"ipc://{tmp_path}/kv", f"ipc://{tmp_path}/replay"
    with publishing("--publish", publish, "--replay", replay, "--socket", node.config["socket"]) as command:
        command.says("no depot answers")
        with Router(publish, replay) as router, node.open([BYTES], {"model": "m"}) as store:
            dump(store, 1)
            router.until(lambda router: router.at("pool") == {1} == router.at("posix"))
            node.kill()
            # The store starts another one, over the same directory.
            deadline = time.monotonic() + HANG_S
            while (depot := store.stats().get("depot") or {}).get("pid", node.pid) == node.pid:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            node.pid = depot["pid"]
            dump(store, 2)
            router.until(lambda router: (router.at("pool"), router.at("posix")) == ({2}, {1, 2}))
        command.end(signal.SIGINT)


def test_a_router_that_misses_the_last_batches_learns_them_by_asking(node: NodeDepot, tmp_path: Path) -> None:
    publish, replay = f"ipc://{tmp_path}/kv", f"ipc://{tmp_path}/replay"
    options = ("--publish", publish, "--replay", replay, "--socket", node.config["socket"])
    with (
        node.open([BYTES], {"model": "m"}) as store,
        publishing(*options),
        Router(f"ipc://{tmp_path}/nobody", replay) as router,
    ):
        dump(store, 1)
        router.until(lambda router: router.at("pool") == {1} == router.at("posix"))
        dump(store, 2)
        router.until(lambda router: router.at("pool") == {1, 2} == router.at("posix"))


def test_a_publisher_that_dies_leaves_nothing_behind(node: NodeDepot, tmp_path: Path) -> None:
    publish, replay = f"ipc://{tmp_path}/kv", f"ipc://{tmp_path}/replay"
    options = ("--publish", publish, "--replay", replay, "--socket", node.config["socket"])
    with node.open([BYTES], {"model": "m"}) as store:
        dump(store, 1, 2)
        with publishing(*options) as command, Router(publish, replay) as router:
            router.until(lambda router: router.at("posix") == {1, 2})
            os.kill(command.process.pid, signal.SIGKILL)
            command.process.wait(HANG_S)
            store.reset()
            dump(store, 3)
            with publishing(*options):
                # The next batch that it sees is one of the new run, from which it learns that it has missed some.
                dump(store, 4)
                deadline = time.monotonic() + HANG_S
                number = 5
                while not router.at("posix") >= {3, 4}:
                    assert time.monotonic() < deadline
                    dump(store, number)
                    number += 1
                    router._receive()
                router.until(lambda router: router.at("posix") == {*range(3, number)} == router.at("pool"))


def test_routers_that_cannot_ask_get_everything_again(node: NodeDepot, tmp_path: Path) -> None:
    publish = f"ipc://{tmp_path}/kv"
    with (
        node.open([BYTES], {"model": "m"}) as store,
        publishing("--publish", publish, "--repeat-s", "0.2", "--socket", node.config["socket"]) as command,
    ):
        dump(store, 1, 2)
        command.says("namespace")
        with Router(publish) as router:
            router.until(lambda router: router.at("pool") == {1, 2} == router.at("posix"))


def test_a_namespace_of_all_ranks_is_published(node: NodeDepot, tmp_path: Path) -> None:
    publish, replay = f"ipc://{tmp_path}/kv", f"ipc://{tmp_path}/replay"
    with (
        node.open([BYTES], {"rank": 0}) as one,
        node.open([BYTES], {"rank": 1}) as other,
        node.open([BYTES], {"model": "another"}) as another,
    ):
        ranks = f"{one.namespace_id},{other.namespace_id[:12]}"
        options = ("--publish", publish, "--replay", replay, "--namespace", ranks, "--socket", node.config["socket"])
        dump(one, 1, 2)
        dump(another, 1, 2, 3)
        dump(other, 2, 3)
        with publishing(*options) as command, Router(publish, replay) as router:
            assert command.started["namespaces"] == [ranks]
            router.until(lambda router: router.at("pool") == {2} == router.at("posix"))
            dump(one, 3)
            router.until(lambda router: router.at("pool") == {2, 3} == router.at("posix"))


def test_a_pool_server_publishes_blocks_of_other_nodes(tmp_path: Path) -> None:
    """By the namespaces and hashes of the nodes' own depots."""
    publish, replay, socket_path = f"ipc://{tmp_path}/kv", f"ipc://{tmp_path}/replay", str(tmp_path / "pool.sock")
    port = free_port()
    serve = [sys.executable, "-m", "kvdepot", "serve", "--socket", socket_path, "--prealloc-size", "0.0625"]
    server = subprocess.Popen([*serve, "--service-port", str(port), "--manage-port", "0"])
    try:
        deadline = time.monotonic() + HANG_S
        while True:
            assert time.monotonic() < deadline
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.02)
        node = {"mode": "embedded", "pipeline": "Cache|Remote", "remote_servers": [f"127.0.0.1:{port}"]}
        node["remote_timeout_ms"] = 60_000
        with (
            kvdepot.open({**node, "pool_gb": 0.0625}, layout=[BYTES], namespace={"model": "m"}) as store,
            publishing("--publish", publish, "--replay", replay, "--socket", socket_path) as command,
            Router(publish, replay) as router,
        ):
            dump(store, 1, 2, 3)
            router.until(lambda router: router.at("pool") == {1, 2, 3})
            assert command.says("namespace")["namespace"] == store.namespace_id
    finally:
        server.terminate()
        server.wait(HANG_S)


def local(name: str, at: Path) -> Any:
    return endpoint("--publish", f"ipc://{at}/{name}")


def filled(batches: int) -> EventStream:
    stream = EventStream(Contents(), BatchEncoder(), first=1000, batches_kept=batches)
    stream.begin(0.0)
    for number in range(batches - 1):
        stream.add([BlockEvent("a" * 32, "pool", True, (number.to_bytes(16, "big"),))], 0.0)
    return stream


def at_once(_: int) -> bool:
    return True


def test_an_answer_longer_than_its_reader_s_queue(tmp_path: Path) -> None:
    stream, sockets = filled(5000), Sockets(local("kv", tmp_path), local("replay", tmp_path), "", 100)
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.setsockopt(zmq.RCVHWM, 10)
        reader.setsockopt(zmq.LINGER, 0)
        reader.connect(sockets.replay_address or "")
        for malformed in ((b"", b"short"), (b"frame", bytes(8)), (b"", bytes(8), b""), (bytes(8),)):
            reader.send_multipart(malformed)
        reader.send_multipart((b"", (1000).to_bytes(8, "big")))
        numbers: list[bytes] = []
        is_asked = is_full = False
        # Their time stands still, so that no answer is given up however slow the machine is.
        now_s = time.monotonic()
        deadline = now_s + HANG_S
        while not numbers or numbers[-1] != END_SEQUENCE:
            assert time.monotonic() < deadline, len(numbers)
            if request := sockets.request(at_once, now_s):
                sockets.answer(request, stream.replay(request.start, 0.0), now_s)
                is_asked = True
            is_full |= not sockets.turn(now_s) and is_asked
            # Reads nothing until the queues are full.
            while is_full and reader.poll(POLL_MS):
                numbers.append(reader.recv_multipart()[2])
        assert [int.from_bytes(number, "big") for number in numbers[:-1]] == list(range(1000, 6000))
        assert (sockets.malformed, sockets.answers_dropped) == (4, 0)
    sockets.close()


def test_a_reader_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    stream, sockets = filled(3000), Sockets(local("kv", tmp_path), local("replay", tmp_path), "", 100)
    context = zmq.Context()
    reader = context.socket(zmq.DEALER)
    reader.connect(sockets.replay_address or "")
    reader.send_multipart((b"", bytes(8)))
    # Its time stands still, so that no answer is given up however slow the machine is.
    now_s = time.monotonic()
    deadline = now_s + HANG_S
    while not (request := sockets.request(at_once, now_s)):
        assert time.monotonic() < deadline
        sockets.wait(0.01)
    sockets.answer(request, stream.replay(request.start, 0.0), now_s)
    context.destroy(linger=0)
    while sockets._replays:
        assert time.monotonic() < deadline
        sockets.turn(now_s)
    assert sockets.answers_dropped == 0
    sockets.close(linger_ms=0)


def test_subscribers_that_ask_while_there_is_no_room_are_answered_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that never got the end of an answer would wait for ever."""
    stream, sockets = filled(3), Sockets(local("kv", tmp_path), local("replay", tmp_path), "", 100)
    slept: list[float] = []
    monkeypatch.setattr("kvdepot.publish.sockets.time.sleep", slept.append)
    # Their time stands still, so that no answer is given up however slow the machine is.
    now_s = time.monotonic()
    deadline = now_s + HANG_S
    with zmq.Context() as context:
        clients = [context.socket(zmq.DEALER) for _ in range(2 * ANSWERS_MAX)]
        for client in clients:
            client.setsockopt(zmq.LINGER, 0)
            client.connect(sockets.replay_address or "")
            client.send_multipart((b"", bytes(8)))
        while len(sockets._replays._answers) < ANSWERS_MAX:
            assert time.monotonic() < deadline
            if request := sockets.request(at_once, now_s):
                sockets.answer(request, stream.replay(request.start, 0.0), now_s)
        assert sockets.request(at_once, now_s) is None
        assert not slept
        sockets.wait(0.25)
        assert slept == [0.25], "a request that there is no room for does not wake it"
        ended = [False] * len(clients)
        while not all(ended):
            assert time.monotonic() < deadline, ended
            while request := sockets.request(at_once, now_s):
                sockets.answer(request, stream.replay(request.start, 0.0), now_s)
            sockets.turn(now_s)
            for at, client in enumerate(clients):
                while client.poll(0):
                    ended[at] = client.recv_multipart()[2] == END_SEQUENCE
        assert (sockets.answers_dropped, sockets.malformed) == (0, 0)
        for client in clients:
            client.close()
    sockets.close(linger_ms=0)


class ScriptedEvents:
    """A follower whose depot comes and goes at the test's word."""

    def __init__(self) -> None:
        self.attached = False
        self.in_step = False
        self.batches: list[list[BlockEvent]] = []

    def take(self, most: int) -> list[BlockEvent]:
        taken = self.batches.pop(0) if self.batches else []
        self.in_step = not self.batches
        return taken


def test_what_the_user_is_told(tmp_path: Path) -> None:
    events, told, stop = ScriptedEvents(), list[tuple[str, dict[str, Any]]](), threading.Event()
    name = "a" * 32
    other = BlockEvent("b" * 32, "pool", True, (bytes(15) + b"x",))
    events.batches = [[], [], [BlockEvent(name, "pool", True, (bytes(16),))], [other], []]

    def report(what: str, values: dict[str, Any]) -> None:
        told.append((what, values))
        if what == "no depot answers" and len(told) == 1:
            events.attached = True
        elif what == "contents":
            events.attached = False
        elif what == "no depot answers":
            stop.set()

    sockets = Sockets(local("kv", tmp_path), None, "", 100)
    stream = EventStream(Contents(), BatchEncoder(), first=1)
    Publisher(events, stream, sockets, report).run(stop)  # type: ignore[arg-type]
    sockets.close()
    assert [what for what, _ in told] == [
        "no depot answers",
        "attached",
        "namespace",
        "namespace",
        "several namespaces",
        "contents",
        "no depot answers",
        "ended",
    ]
    assert told[2][1] == {"namespace": name}
    assert (told[5][1]["blocks"], told[5][1]["next_sequence"]) == ({"pool": 2}, 4)


def test_a_repetition_leaves_in_parts_that_fit_a_subscriber_s_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, stop, turns = ScriptedEvents(), threading.Event(), [0]
    many = tuple(number.to_bytes(16, "big") for number in range(10 * BLOCKS_PER_EVENT))
    events.batches = [[BlockEvent("a" * 32, "pool", True, many)], []]
    sockets = Sockets(local("kv", tmp_path), None, "", 8)

    def publish(_: Batch) -> None:
        turns[-1] += 1

    def turn(_: float) -> bool:
        turns.append(0)
        if sum(turns) >= 1 + 10 + 2 * (1 + 10) or len(turns) > 20_000:
            stop.set()
        return False

    monkeypatch.setattr(sockets, "publish", publish)
    monkeypatch.setattr(sockets, "turn", turn)
    monkeypatch.setattr(sockets, "wait", lambda _: time.sleep(0.005))
    stream = EventStream(Contents(), BatchEncoder(), first=1)
    Publisher(events, stream, sockets, lambda *_: None, 0.001).run(stop)  # type: ignore[arg-type]
    sockets.close(linger_ms=0)
    first, *later, _ = turns
    assert first - 1 - 10 in (0, 2), "the first batch, the changes, and perhaps a part already"
    assert max(later) == 2
    assert sum(later) >= 2 * 10


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("fails", ["take", "report", "request"])
def test_routers_forget_a_publisher_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, clears: bool
) -> None:
    events, told = ScriptedEvents(), Router.__new__(Router)
    told.blocks, told.next = set(), None
    events.attached = True
    events.batches = [[BlockEvent("a" * 32, "pool", True, (bytes(16), bytes(15) + b"x"))], []]
    sockets = Sockets(local("kv", tmp_path), None, "", 100)
    most: list[int] = []

    def publish(batch: Batch) -> None:
        told._apply(batch.sequence, batch.payload)
        most.append(len(told.blocks))

    def fail(*_: Any) -> Any:
        raise BrokenPipeError(fails)

    def report(what: str, _: dict[str, Any]) -> None:
        if fails == "report" and what == "contents":
            fail()
        if fails in ("take", "request") and what == "contents":
            monkeypatch.setattr(*((events, "take") if fails == "take" else (sockets, "request")), fail)

    monkeypatch.setattr(sockets, "publish", publish)
    stream = EventStream(Contents(), BatchEncoder(), first=1, clears=clears)
    with pytest.raises(BrokenPipeError, match=fails):
        Publisher(events, stream, sockets, report).run(threading.Event())  # type: ignore[arg-type]
    sockets.close(linger_ms=0)
    assert (max(most), told.blocks) == (2, set())


def test_sockets_that_fail_are_the_error_that_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = Sockets(local("kv", tmp_path), None, "", 100)
    numbers: list[int] = []

    def publish(batch: Batch) -> None:
        numbers.append(batch.sequence)
        raise zmq.ZMQError(zmq.ENOTSOCK if len(numbers) > 1 else zmq.EFSM)

    monkeypatch.setattr(sockets, "publish", publish)
    stream = EventStream(Contents(), BatchEncoder(), first=1)
    publisher = Publisher(ScriptedEvents(), stream, sockets, lambda *_: None)  # type: ignore[arg-type]
    with pytest.raises(zmq.ZMQError) as raised:
        publisher.run(threading.Event())
    assert (raised.value.errno, numbers) == (zmq.EFSM, [1, 2])
    sockets.close(linger_ms=0)


def test_addresses_are_bound_by_vllm_s_rule() -> None:
    bound = ("tcp://*:5557", "tcp://*:0", "tcp://[::]:5557", "tcp://[::1]:5557", "ipc:///run/kv")
    assert {endpoint("--publish", address).binds for address in bound} == {True}
    assert not endpoint("--publish", "tcp://router.example:5557").binds
    assert endpoint("--publish", "tcp://127.0.0.1:0", binds=True).binds
    wrong = ("5557", "tcp://host", "tcp://host:70000", "tcp://host:0", "udp://host:1", "tcp://a b:1", "ipc://", "")
    for address in wrong:
        with pytest.raises(ConfigError, match="--publish: "):
            endpoint("--publish", address)


def test_an_address_in_use_is_an_error_that_names_it(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        address = f"tcp://127.0.0.1:{port}"
        with pytest.raises(UnavailableError, match=f"{address}: cannot bind it: Address already in use"):
            Sockets(local("kv", tmp_path), endpoint("--replay", address, binds=True), "", 100)


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (["--topic", "kv"], 2, "--topic: belongs to --publish"),
        (["--no-clear"], 2, "--no-clear: belongs to --publish"),
        (["--publish", "tcp://*:0", "--follow"], 2, "--follow: --publish follows anyway"),
        (["--publish", "tcp://host"], 2, "neither tcp://HOST:PORT nor ipc://PATH"),
        (["--publish", "tcp://*:0", "--namespace", "model"], 2, "'model' is not 8 to 32 hexadecimal digits"),
        (["--publish", "tcp://*:0", "--namespace", "aaaaaaaa,aaaaaaaab"], 2, "is listed twice"),
        (["--publish", "tcp://*:0", "--topic", "k" * 1025], 2, "--topic: 1025 bytes"),
    ],
)
def test_options_that_make_no_sense(options: list[str], status: int, says: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["events", "--socket", str(tmp_path / "depot.sock"), *options])
    assert (done.exit_code, says in done.output) == (status, True), done.output


def test_without_its_packages_the_command_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "kvdepot.publish.sockets")
    done = CliRunner().invoke(main, ["events", "--socket", str(tmp_path / "depot.sock"), "--publish", "tcp://*:0"])
    assert done.exit_code == 1
    assert "zmq is missing: pip install 'kvdepot[events]'" in done.output
