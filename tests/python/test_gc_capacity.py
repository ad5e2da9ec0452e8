"""``kvdepot gc``: the capacity of the configuration and of the depots that share one, which the ledger names."""

import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import kvdepot
from kvdepot import _native
from kvdepot.cli import main
from kvdepot.stored.ledger import LEDGER, find_ledgers
from kvdepot.stored.temporaries import own_host

LAYOUT = kvdepot.BlockLayout(shards=1, tensor_sizes_bytes=[5000])
BLOCKS = 12
FILE_BYTES = 12_288
GIB = 1 << 30


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(main, [str(one) for one in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test's own runtime directory, where no depot of the user runs."""
    with tempfile.TemporaryDirectory(prefix="kvd") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        monkeypatch.setenv("XDG_CACHE_HOME", directory)
        yield


def fill(directory: Path, **more: Any) -> kvdepot.Store:
    """Returns an open store whose blocks are all on disk."""
    directory.mkdir(exist_ok=True)
    settings = {"directories": [str(directory)], "pool_gb": 0.0625, "log_level": "warn", **more}
    store = kvdepot.open(settings, layout=LAYOUT, namespace={"model": "tiny"})
    rows = [[np.full(5000, index, dtype=np.uint8)] for index in range(BLOCKS)]
    store.dump([b"%d" % index for index in range(BLOCKS)], rows).wait().raise_for_failures()
    assert store.drain(60_000)
    return store


def test_gc_takes_the_capacity_of_the_configuration(tmp_path: Path) -> None:
    directory, file = tmp_path / "blocks", tmp_path / "kvdepot.yaml"
    fill(directory).close()
    file.write_text(f"directories: [{directory}]\n")
    said = json.loads(run("gc", "--config", file, "--json"))
    assert (said["found"], said["capacity_bytes"]) == ([], None), "a share of the disk is no limit for gc"
    file.write_text(f"directories: [{directory}]\nposix_capacity_gb: {9.5 * FILE_BYTES / GIB}\n")
    said = json.loads(run("gc", "--config", file, "--dry-run", "--json"))
    assert [one["kind"] for one in said["found"]] == ["cold"] * 3
    assert said["capacity_of"] == "the configuration"
    assert "of the configuration" in run("gc", "--config", file)
    assert json.loads(run("gc", "--config", file, "--capacity-gb", 1, "--json"))["found"] == []
    run("gc", "--config", file, "--apply")
    assert len(list(directory.rglob("*.kvb"))) == 9


def test_gc_names_the_depots_that_share_a_capacity_and_takes_theirs(tmp_path: Path) -> None:
    directory, file = tmp_path / "blocks", tmp_path / "kvdepot.yaml"
    capacity = BLOCKS * FILE_BYTES
    store = fill(directory, posix_capacity_gb=64 * FILE_BYTES / GIB, posix_capacity_shared=True)
    (ledger,) = find_ledgers([directory])
    (member,) = ledger.members
    assert (member.host, member.pid, member.here, member.running) == (own_host(), os.getpid(), True, True)
    assert member.capacity_bytes // FILE_BYTES == 64
    # Another node has joined, with a smaller capacity.
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    add_member(other, "node7.abcd1234.4026531836-77-1234-1", capacity - FILE_BYTES)
    file.write_text(f"directories: [{other}]\nposix_capacity_gb: {capacity / GIB}\n")
    said = json.loads(run("gc", "--config", file, "--dry-run", "--json"))
    assert [(one["pid"], one["here"], one["running"]) for one in said["depots"]] == [
        (os.getpid(), True, True),
        (77, False, None),
    ]
    assert (said["capacity_bytes"], said["capacity_of"]) == (capacity - FILE_BYTES, "the depot on node7 with pid 77")
    assert [one["kind"] for one in said["found"]] == ["cold"]
    shown = run("gc", other)
    assert "the depot on node7 with pid 77 shares these directories" in shown
    assert f"the depot here with pid {os.getpid()} shares" in shown
    assert "shares these directories: stop it" in run("gc", other, "--apply", status=1)
    # It has been silent for longer than its lease.
    newest = max((other / LEDGER).iterdir())
    os.utime(newest, (time.time() - 130,) * 2)
    assert [one.here for ledger in find_ledgers([other]) for one in ledger.members] == [True]
    store.close()
    assert [ledger.members for ledger in find_ledgers([directory])] == [()], "a depot that has ended is no member"
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    assert not list(find_ledgers([other, tmp_path / "nowhere"])), "a damaged ledger names nobody"


def test_the_clock_of_the_file_system_says_which_depots_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS the server dates the ledger, and its clock may be ahead of this machine's, or behind it."""
    directory = tmp_path / "blocks"
    fill(directory, posix_capacity_gb=64 * FILE_BYTES / GIB, posix_capacity_shared=True).close()
    add_member(directory, "node7.abcd1234.4026531836-77-1234-1", BLOCKS * FILE_BYTES)
    newest, real = max((directory / LEDGER).iterdir()), time.time
    for shift_s in (-3600.0, 3600.0):
        monkeypatch.setattr("time.time", lambda shift_s=shift_s: real() + shift_s)
        os.utime(newest)
        assert "shares these directories: stop it" in run("gc", directory, "--apply", status=1)
        os.utime(newest, (real() - 130,) * 2)
        assert [ledger.members for ledger in find_ledgers([directory])] == [()], "longer than its lease"
    kept = sorted(os.listdir(directory))

    def refused(**_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    assert [one.pid for ledger in find_ledgers([directory]) for one in ledger.members] == [77], "nobody knows"
    assert sorted(os.listdir(directory)) == kept


def add_member(directory: Path, name: str, capacity_bytes: int) -> None:
    """Writes the next ledger, in which another depot has joined."""
    newest = max((directory / LEDGER).iterdir())
    data = bytearray(newest.read_bytes()[:-8])
    (rows,) = struct.unpack_from("<I", data, 12)
    number = int(newest.name) + 1
    struct.pack_into("<IQ", data, 12, rows + 1, number)
    data += struct.pack("<10qII120s", 99, 1, capacity_bytes, 0, 0, 0, 0, 0, 0, 0, 0, len(name), name.encode())
    (directory / LEDGER / f"{number:020}").write_bytes(data + struct.pack("<Q", _native.crc64nvme(bytes(data))))
