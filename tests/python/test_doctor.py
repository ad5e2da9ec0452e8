"""`kvdepot doctor`: each check detects its problem, says how to mend it, and leaves directories as they were."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvdepot.checks import directories as places
from kvdepot.checks.directories import check_directories, mount_of
from kvdepot.checks.finding import Finding, bounded, worst
from kvdepot.checks.host import Host, check_host
from kvdepot.checks.network import bucket_endpoint, check_network
from kvdepot.checks.software import (
    DirectoryUser,
    check_depots,
    check_devices,
    check_shared_directories,
    check_software,
)
from kvdepot.cli import main
from kvdepot.config import KVDepotConfig, load_config, machine

GIB = 1 << 30
GOOD = Host("6.18.1", 64 * GIB, None, 8 * GIB)


def config(**keys: Any) -> KVDepotConfig:
    return load_config({"pool_gb": 1.0, **keys}, owns_pool=False)


def by_check(findings: Any) -> dict[str, Finding]:
    found = {one.check: one for one in findings}
    for one in found.values():
        assert one.why, one
        assert bool(one.mend) == (one.state != "ok"), one
    return found


def host_root(tmp_path: Path, transparent: str = "never", nodes: str = "0") -> Path:
    for path, text in {
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": f"always within_size advise [{transparent}] deny force",
        "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "0",
        "sys/devices/system/node/online": nodes,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_a_good_machine_is_ok(tmp_path: Path) -> None:
    found = by_check(check_host(config(), replace(GOOD, root=host_root(tmp_path, "advise")), rdma=True))
    assert set(found) == {"kernel", "processors", "memory", "memlock", "huge pages", "shared memory", "NUMA"}
    assert worst(list(found.values())) == "ok"


@pytest.mark.parametrize(
    ("host", "keys", "rdma", "check", "state"),
    [
        ({"kernel": "5.2.0"}, {}, False, "kernel", "fail"),
        ({"kernel": "5.15.0-generic"}, {}, False, "kernel", "warn"),
        ({"kernel": "?"}, {}, False, "kernel", "fail"),
        ({"processor_quota": 0.5}, {}, False, "processors", "warn"),
        ({"processor_quota": 4.0}, {}, False, "processors", "ok"),
        ({"memory_bytes": GIB // 2}, {}, False, "memory", "fail"),
        ({"memory_bytes": GIB * 11 // 10}, {}, False, "memory", "warn"),
        ({"locked_max_bytes": 8 << 20}, {"pool_mlock": True}, False, "memlock", "fail"),
        ({"locked_max_bytes": 8 << 20}, {}, True, "memlock", "warn"),
        ({"locked_max_bytes": 8 << 20}, {}, False, "memlock", "ok"),
        ({}, {}, False, "huge pages", "warn"),
        ({"shared_bytes": 64 << 20}, {}, False, "shared memory", "warn"),
        ({"shared_bytes": None}, {}, False, "shared memory", "warn"),
        ({}, {"pool_numa": "0,2-3"}, False, "NUMA", "fail"),
    ],
)
def test_each_check_of_the_machine(
    tmp_path: Path, host: dict[str, Any], keys: dict[str, Any], rdma: bool, check: str, state: str
) -> None:
    looked_at = replace(GOOD, root=host_root(tmp_path, nodes="0-1"), **host)
    assert by_check(check_host(config(**keys), looked_at, rdma))[check].state == state


def test_a_directory_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = by_check(check_directories(config(directories=[str(tmp_path)])))
    assert found[f"I/O in {tmp_path}"].state in ("ok", "warn")
    assert "stored and read back" in found[f"I/O in {tmp_path}"].found
    assert found[f"clock of {tmp_path}"].state == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used_fails(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    (finding,) = (one for one in check_directories(config(directories=[str(missing)])) if "missing" in one.check)
    assert (finding.state, "create it" in finding.mend) == ("fail", True)


def test_where_io_uring_is_refused_the_engine_that_works_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_round_trip", lambda _: ("aio", ""))
    found = by_check(check_directories(config(directories=[str(tmp_path)])))[f"I/O in {tmp_path}"]
    assert (found.state, "aio works" in found.found) == ("warn", True)
    monkeypatch.setattr(places, "_round_trip", lambda _: ("aio", "a block was read back with different bytes"))
    found = by_check(check_directories(config(directories=[str(tmp_path)])))[f"I/O in {tmp_path}"]
    assert found.state == "fail"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "keys", "state"),
    [
        ("ext4", {}, "ok"),
        ("tmpfs", {}, "warn"),
        ("overlay", {}, "warn"),
        ("nfs4", {}, "ok"),
        ("nfs4", {"directories_shared": False}, "warn"),
        ("fuse.sshfs", {"directories_shared": False}, "warn"),
    ],
)
def test_what_a_directory_lies_on(tmp_path: Path, kind: str, keys: dict[str, Any], state: str) -> None:
    lines = f"20 1 8:1 / / rw - ext4 /dev/a rw\n21 20 0:5 / {tmp_path} rw shared:1 - {kind} source rw\n"
    found = by_check(check_directories(config(directories=[str(tmp_path)], **keys), lines))
    assert found[f"mount of {tmp_path}"].state == state


def test_mounts_are_found_by_whole_names_and_the_last_one_lies_on_top() -> None:
    lines = (
        "20 1 8:1 / / rw - ext4 /dev/a rw\n"
        "21 20 8:2 / /mnt/kv rw - xfs /dev/b rw\n"
        "22 20 8:3 / /mnt/kv\\040two rw - xfs /dev/c rw\n"
        "23 21 8:4 / /mnt/kv rw - btrfs /dev/d rw\n"
        "garbage\n"
    )
    assert mount_of("/mnt/kv/blocks", lines).source == "/dev/d"
    assert mount_of("/mnt/kv two/x", lines).source == "/dev/c"
    assert mount_of("/mnt/kvx", lines).source == "/dev/a"


def test_versions_and_hashes() -> None:
    versions = {"kvdepot": "0.1.0", "vllm": "0.32.0", "torch": "2.9"}
    found = by_check(check_software({}, versions.get))
    assert "vllm 0.32.0, no sglang, " in found["versions"].found
    assert found["hashes"].state == "ok"
    assert by_check(check_software({}, {**versions, "lmcache": "0.4"}.get))["hashes"].state == "warn"
    assert by_check(check_software({"PYTHONHASHSEED": "0"}, {"lmcache": "0.4"}.get))["hashes"].state == "ok"
    assert by_check(check_software({"PYTHONHASHSEED": "random"}, versions.get))["hashes"].state == "fail"
    assert by_check(check_software({}, {**versions, "kvdepot": "9.9.9"}.get))["versions"].state == "warn"


def test_devices_and_depots(tmp_path: Path) -> None:
    none: dict[str, Any] = {
        "devices": [],
        "driver": None,
        "problem": "not found",
        "adapters": [],
        "adapters_problem": "no library",
    }
    assert by_check(check_devices(none, rdma_wanted=False))["RDMA adapters"].state == "ok"
    assert by_check(check_devices(none, rdma_wanted=True))["RDMA adapters"].state == "fail"
    assert by_check(check_devices({**none, "driver": "13.0"}, rdma_wanted=False))["GPU driver"].state == "warn"
    gpu = {**none, "driver": "13.0", "devices": [{"device": {"name": "H100"}}], "adapters": ["mlx5_0"]}
    found = by_check(check_devices(gpu, rdma_wanted=True, root=tmp_path))
    reach = "GPU memory for adapters"
    assert found[reach].state == "fail"
    assert by_check(check_devices(gpu, rdma_wanted=False, root=tmp_path))[reach].state == "warn"
    assert reach not in by_check(check_devices({**gpu, "adapters": []}, rdma_wanted=False, root=tmp_path))
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    version = tmp_path / "proc/driver/nvidia/version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.1")
    assert by_check(check_devices(gpu, rdma_wanted=True, root=tmp_path))[reach].state == "ok"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1")
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert by_check(check_devices(gpu, rdma_wanted=True, root=tmp_path))[reach].found == "nvidia_peermem"
    assert (found["GPU driver"].found, found["RDMA adapters"].found) == ("CUDA 13.0: H100", "mlx5_0")
    depots = [{"socket": "/s", "pid": 7, "pipeline": "Cache"}]
    assert "one with this configuration" in by_check(check_depots(depots, "/s"))["depots"].found
    assert "none with this configuration" in by_check(check_depots(depots, "/t"))["depots"].found


def test_depots_that_use_one_directory_need_one_limit() -> None:
    one, other = DirectoryUser("one", ("/a", "/b"), one_limit=True), DirectoryUser("other", ("/b",), one_limit=True)
    alone = DirectoryUser("alone", ("/b", "/c"), one_limit=False)
    assert list(check_shared_directories([])) == list(check_shared_directories([alone])) == []
    assert by_check(check_shared_directories([one, other]))["shared directories"].state == "ok"
    assert (
        by_check(check_shared_directories([one, replace(alone, directories=("/c",))]))["shared directories"].state
        == "ok"
    )
    found = by_check(check_shared_directories([one, other, alone]))["shared directories"]
    assert (found.state, found.found) == ("warn", "one and alone both use /b; other and alone both use /b")
    assert "posix_capacity_shared" in found.mend


def test_pool_servers_and_buckets_are_connected_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        there, gone = (f"127.0.0.1:{one.getsockname()[1]}" for one in (server, closed))
        found = by_check(check_network(config(pipeline="Cache|Remote", remote_servers=[there, gone]), {}))
        assert {name: one.state for name, one in found.items()} == {
            f"pool server {there}": "ok",
            f"pool server {gone}": "warn",
        }
        bucket = config(pipeline="Cache|Object", object_url="s3://b/kv", object_endpoint=f"http://{there}")
        assert [one.state for one in check_network(bucket, {})] == ["ok"]
    assert list(check_network(config(pipeline="Cache"), {})) == []


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example"])
def test_a_host_that_cannot_be_a_name_is_a_finding(host: str) -> None:
    (found,) = check_network(config(pipeline="Cache|Remote", remote_servers=[f"{host}:1"]), {})
    assert found.state == "warn"
    assert "no name of a host: " in found.found


def test_a_name_server_that_hangs_does_not_delay_the_exit() -> None:
    script = """
import time
from kvdepot.checks.finding import bounded
from kvdepot.checks.network import check_network
from kvdepot.config import load_config
keys = {"pipeline": "Cache|Remote", "remote_servers": [f"a:{port}" for port in range(1, 5)], "pool_gb": 0.1}
found = check_network(load_config(keys, owns_pool=False), {}, lambda host, port: time.sleep(600))
print([one.state for one in bounded(found, "network", 0.1)])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['fail']\n"


@pytest.mark.parametrize(
    ("url", "environ", "endpoint"),
    [
        ("s3://b/kv", {}, ("s3.us-east-1.amazonaws.com", 443)),
        ("s3://b/kv", {"AWS_REGION": "eu-central-1"}, ("s3.eu-central-1.amazonaws.com", 443)),
        ("s3://b/kv", {"AWS_ENDPOINT_URL": "http://store:9000"}, ("store", 9000)),
        ("gs://b", {}, ("storage.googleapis.com", 443)),
        ("gs://b", {"STORAGE_EMULATOR_HOST": "localhost:4443"}, ("localhost", 4443)),
        ("abfss://c@one.dfs.core.windows.net/kv", {}, ("one.blob.core.windows.net", 443)),
        ("az://c", {"AZURE_STORAGE_ACCOUNT": "two"}, ("two.blob.core.windows.net", 443)),
        ("az://c", {}, None),
    ],
)
def test_where_a_bucket_s_store_is(url: str, environ: dict[str, str], endpoint: tuple[str, int] | None) -> None:
    assert bucket_endpoint(config(pipeline="Cache|Object", object_url=url), environ) == endpoint


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "50000 100000"}, 0.5),
        ({"a/cpu.max": "200000 100000", "cpu.max": "150000 100000"}, 1.5),
        ({"a/cpu.max": "nonsense"}, None),
        ({"cpu/a/cpu.cfs_quota_us": "25000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.25),
        ({"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_quota_of_processors_is_the_lowest_of_all_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: float | None
) -> None:
    for name, text in {"groups": "0::/a\n4:cpu,cpuacct:/a\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "groups")
    assert machine.processor_quota() == quota


def test_the_command_s_status_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "blocks").mkdir()
    file = tmp_path / "kvdepot.yaml"
    file.write_text(f"directories: [{tmp_path}/blocks]\npool_gb: 0.0625\n")
    good = CliRunner().invoke(main, ["doctor", "--config", str(file), "--json"])
    report = json.loads(good.stdout)
    assert (good.exit_code, report["state"]) == (0, worst([Finding(**one) for one in report["checks"]]))
    assert {"devices", "adapters"} <= set(report)
    assert os.listdir(tmp_path / "blocks") == []
    text = CliRunner().invoke(main, ["doctor", "--config", str(file)]).stdout
    assert text.count("RDMA adapters") == text.count("GPU driver") == 1
    assert "-0.0 s" not in text
    (tmp_path / "blocks").rmdir()
    bad = CliRunner().invoke(main, ["doctor", "--config", str(file)])
    assert bad.exit_code == 1
    assert f"fail directory {tmp_path}/blocks" in bad.stdout
    assert "fix: create it" in bad.stdout


def test_a_directory_that_hangs_is_named_and_holds_up_nothing() -> None:
    gate, first = threading.Event(), Finding("first", "ok", "there", "why")

    def findings() -> Iterator[Finding]:
        yield first
        gate.wait()

    try:
        *before, last = bounded(findings(), "directories", 0.2)
    finally:
        gate.set()
    assert before in ([], [first])
    assert (last.check, last.state) == ("directories", "fail")
    assert [one.check for one in bounded(iter([first]), "directories", 60)] == ["first"]

    def broken() -> Iterator[Finding]:
        yield first
        raise OSError("not a check's failure")

    with pytest.raises(OSError, match="not a check"):
        bounded(broken(), "directories", 60)
