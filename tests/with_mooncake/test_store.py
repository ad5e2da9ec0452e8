"""Stores over Mooncake's own master: what one depot has dumped, another one loads."""

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import HANG_S

import kvdepot
from tools.lab.mooncake import Mooncake

BLOCK_BYTES = 200_000
BLOCKS = [(bytes([n]) * 16, np.full(BLOCK_BYTES, n + 1, dtype=np.uint8)) for n in range(12)]
VARIABLES = {
    "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
    "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
    "MOONCAKE_PROTOCOL": "tcp",
    "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0",
    "MOONCAKE_LOCAL_BUFFER_SIZE": "16mb",
}


def settings(mooncake: Mooncake, prefix: str, **more: object) -> dict[str, object]:
    """Returns a configuration of a depot in this process."""
    return {
        "pipeline": "Cache|Mooncake",
        "pool_gb": 0.05,
        "timeout_ms": HANG_S * 1000,
        "mooncake_prefix": prefix,
        **mooncake.options(),
        "mooncake_timeout_ms": 45_000,
        "mooncake_staging_mb": 16,
        **more,
    }


def dump(config: dict[str, object]) -> None:
    """Stores all blocks. The end of the depot waits until its tiers have them."""
    with kvdepot.open(config, layout=[BLOCK_BYTES], namespace={"model": "mooncake"}) as store:
        hashes, blocks = zip(*BLOCKS, strict=True)
        store.dump(list(hashes), [[block] for block in blocks]).wait().raise_for_failures()


def loaded(config: dict[str, object]) -> int:
    """Returns how many blocks a new depot loads. Those have the right bytes (P1)."""
    with kvdepot.open(config, layout=[BLOCK_BYTES], namespace={"model": "mooncake"}) as store:
        hashes, blocks = zip(*BLOCKS, strict=True)
        into = [np.zeros_like(block) for block in blocks]
        failed = set(store.load(list(hashes), [[block] for block in into]).wait().failed)
        right = [n for n in range(len(blocks)) if n not in failed]
        assert all((into[n] == blocks[n]).all() for n in right)
        return len(right)


def test_a_depot_finds_what_another_one_stored(mooncake: Mooncake) -> None:
    config = settings(mooncake, "shared")
    assert loaded(config) == 0
    dump(config)
    assert loaded(config) == len(BLOCKS)
    assert loaded(settings(mooncake, "others")) == 0


def test_above_a_disk(mooncake: Mooncake, tmp_path: Path) -> None:
    def on_disk(name: str, prefix: str) -> dict[str, object]:
        (tmp_path / name).mkdir(exist_ok=True)
        directories = {"pipeline": "Cache|Mooncake|Posix", "directories": [str(tmp_path / name)]}
        return settings(mooncake, prefix, posix_capacity_gb=0.1, **directories)

    dump(on_disk("one", "above"))
    assert loaded(on_disk("two", "above")) == len(BLOCKS), "an empty disk, and the blocks in Mooncake"
    assert loaded(on_disk("one", "empty")) == len(BLOCKS), "an empty Mooncake, and the blocks on the disk"


def test_mooncake_s_own_variables_count(mooncake: Mooncake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MOONCAKE_MASTER", mooncake.address)
    config = settings(mooncake, "variables", mooncake_config_path=None)
    dump(config)
    assert loaded(config) == len(BLOCKS)


def test_the_helper_ends_with_its_depot(mooncake: Mooncake) -> None:
    """Also with one that is killed (P4)."""
    script = f"""
import kvdepot, os
store = kvdepot.open({settings(mooncake, "killed")!r}, layout=[{BLOCK_BYTES}], namespace={{"model": "mooncake"}})
print(os.getpid(), flush=True)
input()
"""
    depot = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert depot.stdout is not None
        pid = int(depot.stdout.readline())
        helpers: list[int] = []
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # The thread has ended.
                helpers += map(int, file.read_text().split())
        assert helpers
    finally:
        depot.kill()
        depot.communicate()
    wait_for_end(helpers)


def wait_for_end(pids: list[int]) -> None:
    """Waits until none of these processes runs any more."""
    for pid in pids:
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([process], [], [], HANG_S)
        os.close(process)
        assert ended, f"process {pid} outlives its depot"
