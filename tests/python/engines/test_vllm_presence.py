"""The lines in vLLM's log about the depot, each written once."""

import logging
from pathlib import Path
from typing import Any

import pytest
from engine_parts import FakeDepot, geometry, options

from kvdepot.config import load_config
from kvdepot.engines.vllm.meta import LoadReport
from kvdepot.engines.vllm.presence import Place, Presence, taken_sizes
from kvdepot.engines.vllm.scheduler import SchedulerSide


class Depot:
    """A depot that comes and goes."""

    def __init__(self, attached: bool) -> None:
        self.attached, self.trouble, self.told = attached, "", {"pid": 7, "pool_bytes": 3 << 30}

    def stats(self) -> dict[str, Any]:
        return {"depot": self.told}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class LogLines:
    """Collects levels and lines of the log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def new(self) -> list[tuple[str, str]]:
        """Returns the lines since the last call."""
        found = [(record.levelname, record.getMessage()) for record in self._caplog.records]
        self._caplog.clear()
        return found


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> LogLines:
    caplog.set_level(logging.INFO, "vllm.kvdepot")
    return LogLines(caplog)


def presence(depot: Depot, clock: Clock, *, starts: bool = True, patience_s: float = 10.0) -> Presence:
    return Presence(depot, Place("/run/d.sock", "Cache|Posix", starts, patience_s), clock)


def test_each_change_is_said_once(said: LogLines) -> None:
    depot = Depot(attached=True)
    side = presence(depot, Clock())
    side.begin(["pool_gb is not set"])
    assert said.new() == [
        ("INFO", "kvdepot: pipeline Cache|Posix, depot at /run/d.sock"),
        ("INFO", "kvdepot: pool_gb is not set"),
        ("INFO", "kvdepot: attached to the depot (pid 7, pool of 3.0 GiB)"),
    ]
    for _ in range(3):
        side.look()
    assert said.new() == []
    depot.attached, depot.trouble = False, "it hung up"
    for _ in range(3):
        side.look()
    ((level, text),) = said.new()
    assert (level, "lost (it hung up)" in text) == ("WARNING", True)
    depot.attached, depot.told = True, {"pid": 8, "pool_bytes": 1 << 30}
    for _ in range(3):
        side.look()
    assert said.new() == [("INFO", "kvdepot: the depot is back")]


def test_a_depot_that_this_engine_could_not_start_is_an_error_with_its_last_words(
    said: LogLines, tmp_path: Path
) -> None:
    log = tmp_path / "d.sock.log"
    log.write_text("one\nerror: no such directory\n")
    depot = Depot(attached=False)
    depot.trouble = "nobody listens"
    side = Presence(depot, Place(str(tmp_path / "d.sock"), "Cache"), Clock())
    side.begin()
    side.look()
    _, (level, text) = said.new()
    assert level == "ERROR"
    assert "nobody listens" in text
    assert "error: no such directory" in text


def test_a_depot_that_others_start_is_waited_for_with_a_bound_and_one_error(said: LogLines) -> None:
    depot, clock = Depot(attached=False), Clock()
    side = presence(depot, clock, starts=False)
    side.begin()
    levels = [level for level, _ in said.new()]
    assert levels == ["INFO", "INFO"]
    clock.now += 9.9
    side.look()
    assert said.new() == []
    clock.now += 0.1
    side.look()
    side.look()
    ((level, text),) = said.new()
    assert level == "ERROR"
    assert "start_depot is false" in text
    depot.attached = True
    side.look()
    assert [text for _, text in said.new()] == ["kvdepot: attached to the depot"]


def test_a_depot_that_says_nothing_of_itself_is_attached_all_the_same(said: LogLines) -> None:
    depot = Depot(attached=True)
    depot.told = {}
    presence(depot, Clock()).begin()
    assert said.new()[-1] == ("INFO", "kvdepot: attached to the depot")


def test_the_metric_follows_changes_alone() -> None:
    depot = Depot(attached=False)
    side = presence(depot, Clock())
    assert [side.changed(), side.changed()] == [False, None]
    depot.attached = True
    side.look()
    assert [side.changed(), side.changed()] == [True, None]


def test_sizes_that_nobody_chose_are_said_with_their_rule() -> None:
    text = "\n".join(taken_sizes(load_config({})))
    assert "pool_gb is not set, so a depot that this engine starts takes " in text
    assert "GiB (256, or half of the machine's memory when that is less)" in text
    assert "posix_capacity_gb is not set" in text
    assert "directories is not set" in text
    chosen = {"pool_gb": 0.5, "posix_capacity_gb": 1, "directories": "/tmp"}
    assert taken_sizes(load_config(chosen)) == []
    assert taken_sizes(load_config({"start_depot": False})) == []


def test_why_the_connector_is_off_is_said_once(said: LogLines) -> None:
    side = SchedulerSide(FakeDepot(), options(), geometry(), 2)  # type: ignore[arg-type]
    for why in ("another answer than expected", "the same of another rank"):
        side.reported(LoadReport(broken=why))
    ((level, text),) = said.new()
    assert level == "ERROR"
    assert text.endswith("another answer than expected")
