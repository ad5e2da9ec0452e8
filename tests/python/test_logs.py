"""Log lines in the seeds' format, where operators look for them, with correct numbers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvdepot.config import Machine, load_config
from kvdepot.config.environment import log_settings
from kvdepot.errors import ConfigError

RUN_S = 120
"""Limit against a hang of the test itself, not a measure of speed."""
BLOCKS, SHARDS, SHARD_BYTES = 3, 2, 4096
TASK_BYTES = BLOCKS * SHARDS * SHARD_BYTES
POSIX_BYTES = BLOCKS * SHARDS * SHARD_BYTES

# As in seeds 000 and 003.
CACHE_BEGIN = "[UC][D] Cache task({task_id},{operation},{subtask_number},{size}) dispatching. [PID,TID]"
CACHE_END = "[UC][D] Cache task({task_id},{operation},{subtask_number},{size}) finished, cost {time}ms. [PID,TID]"
POSIX_BEGIN = "[UC][D] Posix task({task_id},{operation},{subtask_number},{size}) dispatching. [PID,TID]"
POSIX_END = "[UC][D] Posix task({task_id},{operation},{subtask_number},{size}) finished, cost {time}ms. [PID,TID]"
TASK_END = "[UC][D] Task({task_id},{operation},{subtask_number},{size}) finished, costs={time}s, bw={speed}GB/s"
FIELDS = {
    "task_id": r"\d+",
    "operation": r"[\w:]+",
    "subtask_number": r"\d+",
    "size": r"\d+",
    "time": r"\d+(?:\.\d+)?",
    "speed": r"\d+(?:\.\d+)?",
}

WORK = f"""
import sys
import numpy as np
import kvdepot

BLOCKS, SHARDS, BYTES = {BLOCKS}, {SHARDS}, {SHARD_BYTES}
hashes = [bytes([number]) * 16 for number in range(BLOCKS)]
rows = lambda: [[np.full(BYTES, number, np.uint8)] for number in range(BLOCKS * SHARDS)]
config = eval(sys.argv[1])
with kvdepot.open(config, layout=kvdepot.BlockLayout(SHARDS, [BYTES]), namespace={{"model": "tiny"}}) as store:
    named = [block for block in hashes for _ in range(SHARDS)]
    shards = list(range(SHARDS)) * BLOCKS
    if "dump" in sys.argv[2]:
        store.dump(named, rows(), shards=shards).wait().raise_for_failures()
        assert store.drain(60_000)
    store.load(named, rows(), shards=shards).wait().raise_for_failures()
"""


def pattern(template: str) -> re.Pattern[str]:
    """Returns a seed's line as a pattern with a group for each of its placeholders."""
    text = re.escape(template)
    for name, form in FIELDS.items():
        text = text.replace(re.escape("{" + name + "}"), f"(?P<{name}>{form})")
    return re.compile(text.replace(re.escape("[PID,TID]"), r"\[(?P<pid>\d+),(?P<tid>\d+)\]"))


def found(template: str, log: str) -> list[dict[str, str]]:
    """Returns the values in a log's lines that match a seed's line."""
    return [match.groupdict() for line in log.splitlines() if (match := pattern(template).search(line))]


def worked(config: dict[str, object], verbs: str = "dump and load", **environ: str) -> str:
    """Returns the standard error of an engine's process that dumps and loads."""
    environment = {**os.environ, "UC_LOGGER_LEVEL": "debug", **environ}
    done = subprocess.run(
        [sys.executable, "-c", WORK, repr(config), verbs],
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture
def node(tmp_path: Path) -> dict[str, object]:
    """The configuration of the test's own depot process."""
    (tmp_path / "blocks").mkdir()
    config: dict[str, object] = {
        "mode": "node",
        "socket": str(tmp_path / "d.sock"),
        "pipeline": "Cache|Posix",
        "directories": [str(tmp_path / "blocks")],
        "pool_gb": 0.0625,
        "io_direct": False,
        "attach_timeout_ms": 60_000,
        "timeout_ms": 60_000,
        "call_timeout_ms": 60_000,
        "idle_exit_s": 1,
    }
    return config


def check_pairs(begins: list[dict[str, str]], ends: list[dict[str, str]]) -> None:
    """The two lines of each task agree."""
    names = ("task_id", "operation", "subtask_number", "size")
    assert [[line[name] for name in names] for line in sorted(begins, key=lambda line: int(line["task_id"]))] == [
        [line[name] for name in names] for line in sorted(ends, key=lambda line: int(line["task_id"]))
    ]


def test_cache_tasks_stand_in_the_engines_log_and_posix_tasks_in_the_depots(node, tmp_path):
    log = worked(node)
    begins, ends = found(CACHE_BEGIN, log), found(CACHE_END, log)
    check_pairs(begins, ends)
    # Each is written by a thread of its own, just after the task's end was told.
    assert sorted(line["operation"] for line in ends) == ["DUMP", "LOAD"]
    assert {(int(line["subtask_number"]), int(line["size"])) for line in ends} == {(BLOCKS * SHARDS, TASK_BYTES)}
    assert len({line["pid"] for line in begins + ends}) == 1

    depot = (tmp_path / "d.sock.log").read_text()
    begins, ends = found(POSIX_BEGIN, depot), found(POSIX_END, depot)
    check_pairs(begins, ends)
    assert {line["operation"] for line in ends} == {"Cache2Backend"}
    assert sum(int(line["subtask_number"]) for line in ends) == BLOCKS
    assert sum(int(line["size"]) for line in ends) == POSIX_BYTES
    assert not found(CACHE_END, depot)
    assert not found(POSIX_END, log)


def test_blocks_that_a_tier_is_asked_for_are_a_task_from_it(node, tmp_path):
    embedded = {name: value for name, value in node.items() if name not in ("mode", "socket")}
    worked(embedded)
    log = worked(embedded, "load")
    begins, ends = found(POSIX_BEGIN, log), found(POSIX_END, log)
    check_pairs(begins, ends)
    assert {line["operation"] for line in ends} == {"Backend2Cache"}
    assert sum(int(line["subtask_number"]) for line in ends) == BLOCKS
    assert sum(int(line["size"]) for line in ends) == POSIX_BYTES


@pytest.mark.parametrize("mode", ["node", "embedded"])
def test_over_a_staging_pool_tasks_are_seed_003_s(node, mode):
    node |= {"pipeline": "Posix", "mode": mode}
    if mode == "embedded":
        del node["socket"]
    log = worked(node)
    ends = found(TASK_END, log)
    assert sorted(line["operation"] for line in ends) == ["PC::D2S", "PC::S2D"]
    for line in ends:
        assert (int(line["subtask_number"]), int(line["size"])) == (BLOCKS * SHARDS, TASK_BYTES)
        seconds, speed = float(line["time"]), float(line["speed"])
        # Both are rounded to this.
        assert TASK_BYTES / (seconds + 1e-6) / 1e9 - 1e-6 <= speed
        assert seconds < 1e-6 or speed <= TASK_BYTES / (seconds - 1e-6 + 1e-12) / 1e9 + 1e-6
    assert not found(CACHE_END, log)


def test_nothing_of_it_is_said_unless_it_is_asked_for(node):
    assert "[UC]" not in worked(node, UC_LOGGER_LEVEL="info")


def test_json_lines_say_the_same(node):
    lines = [json.loads(line) for line in worked(node | {"log_format": "json"}).splitlines()]
    said = [line["message"] + f" [{line['pid']},{line['tid']}]" for line in lines]
    assert len(found(CACHE_END, "\n".join(said))) == 2
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", line["time"]) for line in lines)


def test_a_depots_log_is_bounded_by_the_seeds_variables(node, tmp_path):
    # Debug lines of a few hundred tasks; the bound is a MiB at least, so the file is filled before.
    log = tmp_path / "d.sock.log"
    log.write_text("x" * ((1 << 20) - 100) + "\n")
    worked(node, UCM_LOG_MAX_SIZE="1", UCM_LOG_MAX_FILES="2")
    kept = sorted(path.name for path in tmp_path.glob("d.sock.log*"))
    assert kept == ["d.sock.log", "d.sock.log.1"]
    assert log.stat().st_size < (1 << 20) - 100
    assert (tmp_path / "d.sock.log.1").read_text().startswith("xxx")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (10, 10)),
        ({"UCM_LOG_MAX_SIZE": "256", "UCM_LOG_MAX_FILES": "3"}, (256, 3)),
        ({"UCM_LOG_MAX_SIZE": " 0 "}, (0, 10)),
        ({"UCM_LOG_MAX_FILES": "0"}, (10, 1)),
        ({"UCM_LOG_MAX_SIZE": "5242880"}, (5, 10)),
        ({"UCM_LOG_MAX_SIZE": "1048575"}, (1048575, 10)),
    ],
)
def test_the_environment_goes_before_the_configuration(environ, expected):
    settings = log_settings(load_config({}), environ)
    assert (settings.max_size_mb, settings.max_files) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {"UCM_LOG_MAX_SIZE": "5M"},
        {"UCM_LOG_MAX_SIZE": "9" * 5000},
        {"UCM_LOG_MAX_FILES": "1001"},
        {"UCM_LOG_MAX_FILES": "-1"},
    ],
)
def test_a_variable_without_meaning_is_named(environ):
    [(variable, said)] = environ.items()
    with pytest.raises(ConfigError, match=f"{variable} is '{said}': write a whole number"):
        log_settings(load_config({}), environ)


def test_explain_names_the_variable():
    machine = Machine(memory_bytes=1 << 40, environ={"UCM_LOG_MAX_FILES": "4", "HOME": "/h"}, free_disk_bytes=1 << 40)
    [setting] = [one for one in load_config({}).effective(machine) if one.key == "log_max_files"]
    assert (setting.value, setting.origin) == (4, "environment UCM_LOG_MAX_FILES")


MISS = """
import sys, numpy, kvdepot
with kvdepot.open(eval(sys.argv[1]), layout=kvdepot.BlockLayout(1, [4096]), namespace={"model": "tiny"}) as store:
    store.dump([b"a"], [[numpy.zeros(4096, numpy.uint8)]]).wait().raise_for_failures()
    assert store.lookup_on_prefix([b"a"]) == 1
    assert store.lookup_on_prefix([b"a", *(f"{number}".encode() for number in range(200))]) == 1
    assert store.stats()["depot"]  # it has answered, so it has written the line
"""


def test_each_lookup_that_misses_has_one_line_in_the_depots_log(node, tmp_path):
    command = [sys.executable, "-c", MISS, repr(node)]
    subprocess.run(command, env={**os.environ, "UC_LOGGER_LEVEL": "debug"}, check=True, timeout=RUN_S)
    log = (tmp_path / "d.sock.log").read_text()
    (line,) = (line for line in log.splitlines() if "blocks were hits" in line)
    assert "1 of 201 blocks were hits; of the other 200 the first one is missing: never_stored (namespace " in line
