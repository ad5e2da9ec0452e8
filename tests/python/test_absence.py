"""What the user is told when no depot answers."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvdepot
from kvdepot.absence import absence, last_words, tell_if_absent
from kvdepot.config import load_config
from kvdepot.engines.counters import Counters
from kvdepot.engines.sglang.room import Room

UNTIL_S = 60.0


def test_the_last_words_are_the_last_line(tmp_path: Path) -> None:
    log = tmp_path / "d.sock.log"
    assert last_words(str(log)) == "It has written no log."
    log.write_text("\n")
    assert last_words(str(log)) == f"Its log {log} is empty."
    log.write_text("one\nerror: no such directory\n\n")
    assert last_words(str(log)) == f"Its log {log} ends: error: no such directory"


def test_only_a_depot_that_this_process_starts_has_last_words(tmp_path: Path) -> None:
    socket = tmp_path / "d.sock"
    (tmp_path / "d.sock.log").write_text("error: no such directory")
    text = absence(str(socket), "nobody listens", 10.2, starts=True)
    assert text.startswith(f"no depot answers at {socket} after 10 s (nobody listens): everything is a miss")
    assert text.endswith("error: no such directory")
    assert absence(str(socket), "", 0.5, starts=False).endswith("start_depot is false: is kvdepot serve running?")


def test_a_depot_that_others_start_is_a_warning_and_one_that_answers_is_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    depot: Any = SimpleNamespace(attached=False, trouble="nobody listens")
    for starts in (True, False):
        tell_if_absent(depot, load_config({"start_depot": starts}), "/run/d.sock", 1.0, logging.getLogger("test"))
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    depot.attached = True
    tell_if_absent(depot, load_config({}), "/run/d.sock", 1.0, logging.getLogger("test"))
    assert len(caplog.records) == 2


def open_library(config: dict[str, Any]) -> None:
    with kvdepot.open(config, layout=[4096], namespace={"model": "m"}) as store:
        assert not store.attached


def open_sglang(config: dict[str, Any]) -> None:
    Room(load_config(config), Counters(lambda: logging.getLogger("test"))).close()


@pytest.mark.parametrize(("face", "name"), [(open_library, "kvdepot"), (open_sglang, "sglang.kvdepot")])
def test_a_depot_that_cannot_start_is_an_error_that_says_why(
    face: Callable[[dict[str, Any]], None], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    config = {
        "mode": "node",
        "socket": str(tmp_path / "d.sock"),
        "pipeline": "Cache|Posix",
        "directories": [str(file / "blocks")],
        "posix_capacity_gb": 0.1,
        "pool_gb": 0.0625,
        "attach_timeout_ms": 500,
    }
    end_s = time.monotonic() + UNTIL_S
    # The depot's process may take longer to fail than this one waits for it.
    while "a tier's directory cannot be used" not in caplog.text:
        assert time.monotonic() < end_s, caplog.text
        caplog.clear()
        face(config)
        assert [(one.name, one.levelname) for one in caplog.records] == [(name, "ERROR")]
        assert f"no depot answers at {config['socket']}" in caplog.text
