"""Mooncake's master and a holder of its memory, as processes."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HANG_S = 120
HOLDER = """
import sys
import time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
while store.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 16 << 20, "tcp", "", sys.argv[1]) != 0:
    time.sleep(0.2)
print("up", flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Mooncake:
    """A running store.

    Attributes:
        master: address of its master.
        python: interpreter that has its package.
        config: its configuration of a client, as a file.
    """

    master: str
    python: str
    config: Path


def free_port() -> int:
    """Returns a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start_master(binaries: Path) -> "tuple[subprocess.Popen[bytes], str]":
    """Starts a master. Another process may take a port between the question and the start: then others are tried."""
    for _ in range(20):
        port = free_port()
        command = [binaries / "mooncake_master", f"--rpc_port={port}", f"--metrics_port={free_port()}"]
        master = subprocess.Popen(
            [*command, "--rpc_address=127.0.0.1", "--default_kv_lease_ttl=500"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end_s = time.monotonic() + HANG_S
        while master.poll() is None and time.monotonic() < end_s:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                time.sleep(0.05)
                continue
            # It ends when another process answered at the port.
            time.sleep(0.2)
            if master.poll() is None:
                return master, f"127.0.0.1:{port}"
        master.kill()
        master.wait()
    raise AssertionError("no master of Mooncake starts")


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    """A master and a holder of 256 MiB."""
    binaries = Path(os.environ["KVDEPOT_TEST_MOONCAKE"]) / "bin"
    master, address = start_master(binaries)
    holder = subprocess.Popen(
        [binaries / "python", "-c", HOLDER, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        config = tmp_path_factory.mktemp("mooncake") / "mooncake.json"
        config.write_text(
            json.dumps(
                {
                    "local_hostname": "127.0.0.1",
                    "metadata_server": "P2PHANDSHAKE",
                    "master_server_address": address,
                    "protocol": "tcp",
                    "device_name": "",
                    "global_segment_size": 0,
                    "local_buffer_size": "16mb",
                }
            )
        )
        yield Mooncake(address, str(binaries / "python"), config)
    finally:
        for process in (holder, master):
            process.kill()
            process.communicate()
