"""What a depot can serve, as told to those who follow it: with the real core, in this process and behind a socket."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from node import NodeDepot

import kvdepot
from kvdepot.cli import main
from kvdepot.errors import UnavailableError
from kvdepot.events import BlockEvent, BlockEvents

LAYOUT = [4096]
HANG_S = 60.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeDepot]:
    with NodeDepot(tmp_path).with_files(tmp_path / "blocks") as depot:
        yield depot


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def dump(store: kvdepot.Store, *numbers: int) -> None:
    blocks = [[np.full(4096, number % 256, dtype=np.uint8)] for number in numbers]
    store.dump(names(*numbers), blocks).wait().raise_for_failures()
    assert store.drain(60_000)


class Told:
    """What a consumer of events knows."""

    def __init__(self, events: BlockEvents) -> None:
        self.events = events
        self.blocks: set[tuple[str, str, bytes]] = set()

    def apply(self, event: BlockEvent) -> None:
        for one in event.hashes:
            entry = (event.namespace, event.place, one)
            assert (entry in self.blocks) != event.stored, f"told twice: {event}"
            (self.blocks.add if event.stored else self.blocks.discard)(entry)

    def until(self, is_it: Callable[["Told"], bool]) -> None:
        deadline = time.monotonic() + HANG_S
        while not is_it(self):
            assert time.monotonic() < deadline, self.blocks
            for event in self.events.take():
                self.apply(event)
            time.sleep(0.001)

    def at(self, place: str) -> set[int]:
        return {int.from_bytes(one, "big") for _, where, one in self.blocks if where == place}


TIERS: dict[str, dict[str, Any]] = {
    "posix": {},
    "slab": {"pipeline": "Cache|Slab", "slab_path": "slab", "slab_capacity_gb": 0.25, "slab_segment_mb": 16},
    "dax": {"pipeline": "Cache|Dax", "dax_device_path": "dax"},
}


@pytest.mark.parametrize("tier", TIERS)
def test_two_engines_and_a_follower(node: NodeDepot, tmp_path: Path, tier: str) -> None:
    node.config |= {
        key: str(tmp_path / value) if key.endswith("_path") else value for key, value in TIERS[tier].items()
    }
    if tier != "posix":
        del node.config["directories"], node.config["posix_capacity_gb"]
    if tier == "dax":
        with (tmp_path / "dax").open("wb") as medium:
            medium.truncate(128 << 20)
    with node.open(LAYOUT, {"model": "m"}) as one, node.open(LAYOUT, {"model": "m"}) as other:
        dump(one, 1, 2)
        with BlockEvents(node.config["socket"]) as events:
            told = Told(events)
            told.until(lambda told: told.at("pool") == {1, 2} == told.at(tier))
            dump(other, 3)
            told.until(lambda told: told.at("pool") == {1, 2, 3} == told.at(tier))
            assert {name for name, *_ in told.blocks} == {one.namespace_id}
            one.reset()
            told.until(lambda told: not told.blocks)
            dump(other, 3, 4)
            told.until(lambda told: told.at("pool") == {3, 4} == told.at(tier))


def test_eviction_and_a_depot_that_is_killed_are_told(node: NodeDepot) -> None:
    node.config["pool_gb"] = 1 / 256  # 4 MiB: 64 blocks of 64 KiB
    with node.open([65_536], {"model": "m"}) as store, BlockEvents(node.config["socket"]) as events:
        told = Told(events)
        for number in range(100):
            block = [np.full(65_536, number, dtype=np.uint8)]
            store.dump(names(number), [block]).wait().raise_for_failures()
            assert store.drain(60_000)
        told.until(lambda told: len(told.at("posix")) == 100 and 99 in told.at("pool") and events.in_step)
        assert 0 not in told.at("pool")
        killed = node.pid
        node.kill()
        # The store starts another one, over the same directories.
        told.until(lambda told: (told.at("pool"), len(told.at("posix"))) == (set(), 100) and events.in_step)
        # The follower may know the next depot before the store does.
        deadline = time.monotonic() + HANG_S
        while (depot := store.stats().get("depot") or {}).get("pid", killed) == killed:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        node.pid = depot["pid"]


def test_the_command_prints_what_is_there(node: NodeDepot) -> None:
    with node.open(LAYOUT, {"model": "m"}) as store:
        dump(store, 1, 2)
        socket = node.config["socket"]
        printed = CliRunner().invoke(main, ["events", "--socket", socket, "--json"], catch_exceptions=False)
        lines = [json.loads(line) for line in printed.output.splitlines()]
        found: dict[str, set[str]] = {}
        for line in lines:
            assert (line["event"], line["namespace"]) == ("stored", store.namespace_id)
            found.setdefault(line["place"], set()).update(line["hashes"])
        both = {one.hex() for one in names(1, 2)}
        assert found == {"pool": both, "posix": both}
        printed = CliRunner().invoke(main, ["events", "--socket", socket], catch_exceptions=False)
        assert f"{store.namespace_id} pool stored 2" in printed.output


def test_the_command_follows_until_it_is_interrupted(node: NodeDepot) -> None:
    with node.open(LAYOUT, {"model": "m"}) as store:
        command = [sys.executable, "-m", "kvdepot", "events", "--follow", "--json", "--socket", node.config["socket"]]
        # A handler, unlike a signal that is ignored, is not inherited: background jobs of a shell ignore SIGINT.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        signal.signal(signal.SIGINT, before)
        with process:
            try:
                assert process.stdout is not None
                found = set()
                for number in (1, 2):
                    dump(store, number)
                    while names(number)[0].hex() not in found:
                        line = json.loads(process.stdout.readline())
                        found.update(line["hashes"] if line["place"] == "posix" else ())
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=HANG_S)
                assert (process.returncode, errors.strip()) == (0, "")
            finally:
                process.kill()


def test_nothing_is_followed_without_a_depot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "depot.sock"
    with pytest.raises(UnavailableError, match="no depot answers"):
        BlockEvents(str(path))
    # As a depot leaves it that was killed.
    path.touch()
    monkeypatch.setattr("kvdepot.events.ANSWER_MS", 50)
    with pytest.raises(UnavailableError, match="no depot answers"):
        BlockEvents(str(path))
