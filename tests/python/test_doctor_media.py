"""`kvdepot doctor` on media of the Dax and Slab tiers: it finds what a depot would refuse, and changes nothing."""

import fcntl
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import kvdepot
from kvdepot.checks.finding import Finding
from kvdepot.checks.media import Proc, check_media, holder, mounted_at
from kvdepot.cli import main
from kvdepot.config import load_config

MIB = 1 << 20


def proc_with(mount: str = "ext4", locks: str | None = None) -> Proc:
    return Proc(f"20 1 8:1 / / rw - {mount} /dev/a rw\n", Proc.here().locks if locks is None else locks)


def checked(keys: dict[str, Any], *, runs: bool = False, mount: str = "ext4", locks: str | None = None) -> Finding:
    proc = proc_with(mount, locks)
    (finding,) = check_media(load_config({"pool_gb": 0.0625, **keys}, owns_pool=False), runs=runs, proc=proc)
    assert finding.why
    assert bool(finding.mend) == (finding.state != "ok"), finding
    return finding


def dax(path: Path, **keys: Any) -> dict[str, Any]:
    return {"pipeline": "Cache|Dax", "dax_device_path": str(path), **keys}


def slab(path: Path, **keys: Any) -> dict[str, Any]:
    return {"pipeline": "Cache|Slab", "slab_path": str(path), "slab_segment_mb": 1, **keys}


def opened(keys: dict[str, Any]) -> kvdepot.Store:
    config = {"pool_gb": 0.0625, "log_level": "error", "mode": "embedded", **keys}
    return kvdepot.open(config, layout=[4096], namespace={"model": "tiny"})


@pytest.fixture
def medium(tmp_path: Path) -> Path:
    path = tmp_path / "medium"
    with path.open("wb") as file:
        file.truncate(16 * MIB)
    return path


def user(path: Path) -> str:
    """Returns how a file's user is named here: on overlayfs, `/proc/locks` may have another number for the file."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = holder(str(path), proc_with())
    assert found is None or found.startswith(f"process {os.getpid()} (")
    return found or "another process"


def test_a_pipeline_without_a_medium_has_no_check(tmp_path: Path) -> None:
    posix = load_config({"pool_gb": 0.0625, "directories": [str(tmp_path)]}, owns_pool=False)
    assert list(check_media(posix, runs=False)) == []


def test_a_medium_of_the_dax_tier(medium: Path) -> None:
    empty = checked(dax(medium))
    assert (empty.state, "a file of 0.02 GiB, empty" in empty.found) == ("ok", True)
    assert medium.read_bytes() == bytes(16 * MIB)
    known = user(medium)
    with opened(dax(medium)):
        used = checked(dax(medium))
        assert (used.state, f"in use by {known}" in used.found) == ("fail", True)
        assert "another process" in checked(dax(medium), locks="").found
        assert checked(dax(medium), runs=True).state == "ok"
    before = medium.read_bytes()
    assert "formatted for 0.02 GiB" in checked(dax(medium)).found
    small = checked(dax(medium, dax_max_size_gb=0.01))
    assert (small.state, "formatted for more bytes" in small.found) == ("fail", True)
    large = checked(dax(medium, dax_max_size_gb=1.0))
    assert (large.state, "smaller than configured" in large.found) == ("fail", True)
    assert medium.read_bytes() == before


def test_a_dax_medium_that_is_missing_or_something_else(tmp_path: Path, medium: Path) -> None:
    missing = checked(dax(tmp_path / "missing"))
    assert (missing.state, "truncate" in missing.mend) == ("fail", True)
    device = checked(dax(Path("/dev/null")))
    assert (device.state, "set dax_device_path to a DAX device" in device.mend) == ("fail", True)
    folder = checked(dax(tmp_path))
    assert (folder.state, "no directory" in folder.mend) == ("fail", True)
    medium.write_bytes(b"something else" * 1000)
    foreign = checked(dax(medium))
    assert (foreign.state, "not kvdepot's" in foreign.found) == ("fail", True)
    medium.write_bytes(b"KVDEPDAX\x09" + bytes(MIB))
    version = checked(dax(medium))
    assert (version.state, "version=9" in version.found) == ("fail", True)


def test_a_medium_of_the_slab_tier(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    new = checked(slab(path, slab_capacity_gb=0.03))
    assert (new.state, "a file to create of 0.03 GiB" in new.found) == ("ok", True)
    assert checked(slab(path)).state == "fail", "no size"
    assert "are free" in checked(slab(path, slab_capacity_gb=1_000_000)).found
    nowhere = checked(slab(tmp_path / "missing/slab", slab_capacity_gb=0.03))
    assert (nowhere.state, "directory does not exist" in nowhere.found) == ("fail", True)
    assert not path.exists()
    (tmp_path / "probe").touch()
    known = user(tmp_path / "probe")
    with opened(slab(path, slab_capacity_gb=0.03)):
        assert f"in use by {known}" in checked(slab(path)).found
    before = path.read_bytes()
    assert "formatted for 0.03 GiB" in checked(slab(path)).found
    assert checked(slab(path, slab_capacity_gb=0.02)).state == "fail", "formatted with another size"
    assert path.read_bytes() == before


@pytest.mark.parametrize(("kind", "state"), [("ext4", "ok"), ("tmpfs", "warn"), ("overlay", "warn"), ("nfs4", "warn")])
def test_what_a_medium_lies_on(medium: Path, kind: str, state: str) -> None:
    assert checked(dax(medium), mount=kind).state == state


def flocks(pid: int, place: str) -> str:
    return (
        f"1: POSIX  ADVISORY  WRITE 5 {place} 0 EOF\n2: FLOCK  ADVISORY  WRITE {pid} {place} 0 EOF\n"
        f"3: FLOCK  ADVISORY  WRITE {pid}\ngarbage\n"
    )


def test_the_holder_of_a_lock(medium: Path) -> None:
    facts = os.stat(medium)
    own = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
    lines = flocks(os.getpid(), own)
    found = holder(str(medium), proc_with(locks=lines))
    assert found is not None
    assert found.startswith(f"process {os.getpid()} (")
    assert holder(str(medium), proc_with(locks=lines.replace(own, "00:01:2"))) is None
    assert holder(str(medium) + "x", proc_with(locks=lines)) is None
    other = Proc("20 1 odd / / rw - ext4 /dev/a rw\n", flocks(os.getpid(), f"fa0:4d:{facts.st_ino}"))
    assert holder(str(medium), other) is None


def test_the_holder_of_a_lock_where_files_share_a_number(medium: Path) -> None:
    """On btrfs a lock has the device of the mount, and each subvolume its own files of the same numbers."""
    mounts, place = "20 1 4000:77 / / rw - btrfs /dev/a rw\n", f"fa0:4d:{os.stat(medium).st_ino}"
    locks = Proc(mounts, flocks(os.getpid(), place))
    assert holder(str(medium), locks) is None, "it has a file of that number elsewhere"
    (medium.parent / "other").mkdir()
    twin = medium.parent / "other" / medium.name
    twin.touch()
    with twin.open("rb"):
        assert holder(str(medium), locks) is None
    with medium.open("rb"):
        assert (holder(str(medium), locks) or "").startswith(f"process {os.getpid()} (")
    # No process has this number, as if it were another user's.
    unseen = Proc(mounts, flocks(1 << 30, place))
    assert holder(str(medium), unseen) == f"perhaps process {1 << 30} (unknown)"


def test_a_mounted_device_is_named_by_its_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test-slab` asks `kvdepot doctor` about a real one."""
    mounts = Proc("20 1 8:1 / / rw - ext4 /dev/a rw\n30 20 259:3 / /mnt/a\\040disk rw - xfs /dev/b rw\ngarbage\n", "")
    facts = SimpleNamespace(st_mode=stat.S_IFBLK | 0o600, st_rdev=os.makedev(259, 3))
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda _: facts)
        assert mounted_at("/dev/b", mounts) == "/mnt/a disk"
        facts.st_rdev = os.makedev(259, 4)
        assert mounted_at("/dev/c", mounts) is None
        facts.st_mode, facts.st_rdev = stat.S_IFREG | 0o600, os.makedev(259, 3)
        assert mounted_at("/file", mounts) is None
    assert mounted_at("/missing", mounts) is None


def test_the_command_checks_media(tmp_path: Path, medium: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = tmp_path / "kvdepot.yaml"
    file.write_text(f'pipeline: "Cache|Dax"\ndax_device_path: {medium}\npool_gb: 0.0625\n')
    assert f"medium {medium}: a file of 0.02 GiB" in CliRunner().invoke(main, ["doctor", "--config", str(file)]).stdout
    medium.unlink()
    bad = CliRunner().invoke(main, ["doctor", "--config", str(file)])
    assert bad.exit_code == 1
    assert f"fail medium {medium}" in bad.stdout
