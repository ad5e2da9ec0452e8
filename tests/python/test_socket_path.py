"""Engines with the same configuration use the same socket, in a directory that is safely the user's own."""

import dataclasses
import json
import os
import stat

import pytest

from kvdepot.config import KVDepotConfig, load_config
from kvdepot.config import socket_path as module
from kvdepot.config.core import identity_json
from kvdepot.config.tier_keys import names_of
from kvdepot.config.tier_table import TIERS
from kvdepot.errors import ConfigError


@pytest.fixture
def path_of(machine, tmp_path):
    machine = dataclasses.replace(machine, environ={"HOME": "/home/somebody", "XDG_RUNTIME_DIR": str(tmp_path)})

    def path(config=None, suffix=None, block_bytes=None, **changes):
        config = load_config(config, machine=machine)
        return module.socket_path(config, block_bytes, suffix, dataclasses.replace(machine, **changes))

    return path


def test_one_configuration_one_socket(path_of, tmp_path):
    path = path_of({"directories": "/a"})
    assert path == path_of({"directories": ["/a"], "timeout_ms": 30_000})
    assert path == path_of({"directories": ["/a"]}, suffix="ignored when shared")
    assert path != path_of({"directories": "/b"})
    directory, name = os.path.split(path)
    assert directory == str(tmp_path / "kvdepot")
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    prefix, digits = name.removesuffix(".sock").split("-")
    assert (prefix, len(digits)) == ("depot", 12)


ENGINE_KEYS = {
    "kv_head_slices": 4,
    "use_layerwise": False,
    "enable_event_sync": False,
    "hit_ratio": 0.5,
    "persist_token_threshold": 100,
    "load_policy": "best_effort",
    "copy_threads": 3,
    "copy_engine": "host",
    "copy_engines_forbidden": ["batch"],
    "use_gdr": "auto",
    "gdr_nics": ["mlx5_0"],
    "start_depot": False,
    "attach_timeout_ms": 5,
    "call_timeout_ms": 50,
    "timeout_ms": 5,
    "waiting_queue_depth": 5,
    "running_queue_depth": 5,
    "log_level": "debug",
    "mode": "node",
    "use_lite": True,
    "enable_record_traces": True,
    "trace_directory": "/traces",
    "trace_file_mb": 5,
    "trace_files": 5,
    "metrics_config_path": "/metrics.yaml",
}
MANNER_KEYS = {
    "idle_exit_s": 5,
    "drain_timeout_s": 5,
    "pool_keep_s": 5,
    "evicted_blocks_remembered": 5,
    "pool_mlock": True,
    "pool_numa": "0-1",
    "pool_populate_threads": 4,
    "log_format": "json",
    "log_max_size_mb": 5,
    "log_max_files": 5,
    "log_burst_lines": 5,
    "metrics_port": 18080,
    "metrics_host": "0.0.0.0",
    "metrics_token_file": "/token",
}
DEPOT_KEYS = {
    "pipeline": "Cache",
    "pool_gb": 3,
    "eviction": "lru",
    "directories": "/b",
    "posix_capacity_gb": 4,
    "posix_free_floor_percent": 9,
    "io_direct": True,
    "io_read_threads": 3,
    "io_write_threads": 3,
    "shard_directories": False,
    "posix_compression": True,
    "durable": True,
    "directories_shared": False,
    "posix_capacity_shared": True,
    "posix_write": "when_cold",
}


@pytest.mark.parametrize("key", [*ENGINE_KEYS, *MANNER_KEYS])
def test_engines_that_differ_in_their_own_keys_share_a_depot(path_of, key):
    """Nor do a depot's memory settings and its way of ending make it another one."""
    assert path_of({key: (ENGINE_KEYS | MANNER_KEYS)[key]}) == path_of()


@pytest.mark.parametrize("key", DEPOT_KEYS)
def test_what_a_depot_holds_and_where_makes_it_another_one(path_of, key):
    assert path_of({key: DEPOT_KEYS[key]}) != path_of()


def test_a_depot_that_is_upgraded_keeps_its_socket(path_of, machine):
    """``serve --take-over`` looks for the old depot: a key that came later, and is not set, is no part of the name."""
    said = {"directories": ["/a"], "pool_gb": 1}
    identity = json.loads(identity_json(load_config(said, machine=machine), None, machine))
    assert not {"capacity_shared", "compression"} & identity["posix"].keys()
    assert "placement" not in identity
    assert path_of(said) == path_of(
        said | {"posix_capacity_shared": False, "posix_compression": False, "posix_write_gb_per_day": 0}
    )


def test_every_key_is_an_engine_s_or_a_depot_s():
    """A new key of an engine, or of how a depot runs, must be listed here; a new key of a tier identifies the depot."""
    placed = {"posix_promote", "posix_write_gb_per_day"}
    elsewhere = placed | {"socket", "share_depot", "pool_slots", "load_deadline_ms", "io_engine"}
    later = {key.name for key in KVDepotConfig.key_table() if key.facts.only}
    remote = {name for tier in TIERS if tier.name != "Posix" for name in names_of(tier)}
    known = {*ENGINE_KEYS, *MANNER_KEYS, *DEPOT_KEYS, *elsewhere, *later, *remote}
    assert {key.name for key in KVDepotConfig.key_table()} == known


def test_an_engine_in_a_small_container_finds_the_depot_of_a_large_one(path_of):
    large, small = 1024 << 30, 4 << 30
    assert path_of(memory_bytes=small) == path_of(memory_bytes=large)
    said = {"pool_gb": 64, "start_depot": False}
    assert path_of(said, memory_bytes=small) == path_of(said, memory_bytes=large)


def test_the_state_of_the_machine_changes_nothing(path_of):
    assert path_of(free_disk_bytes=1 << 30) == path_of(free_disk_bytes=1 << 40)


def test_staging_pools_of_other_blocks_are_other_depots(path_of):
    config = {"pipeline": "Staging|Posix", "pool_slots": 4}
    assert path_of(config, block_bytes=4096) != path_of(config, block_bytes=8192)


def test_own_depots(path_of):
    config = {"share_depot": False}
    assert path_of(config, suffix="engine-1") == path_of(config, suffix="engine-1")
    assert path_of(config, suffix="engine-1") != path_of(config, suffix="engine-2")
    assert path_of(config, suffix="engine-1") != path_of()
    with pytest.raises(ConfigError, match="name the engine"):
        path_of(config)


def test_engines_of_several_environments_share_a_depot(path_of, monkeypatch):
    """The interpreter that is found for Mooncake is the engine's own, and no part of what the depot is."""
    here = path_of({"pipeline": "Cache|Mooncake"})
    monkeypatch.setattr("sys.executable", "/other/bin/python")
    assert path_of({"pipeline": "Cache|Mooncake"}) == here
    assert path_of({"pipeline": "Cache|Mooncake", "mooncake_python": "/other/bin/python"}) != here


def test_said_socket_is_taken_as_it_is(path_of):
    assert path_of({"socket": "/run/kv.sock"}) == "/run/kv.sock"


def test_long_runtime_directory_falls_back(path_of, tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(module, "_short_directory", lambda: str(tmp_path / "short"))
    path = path_of(environ={"XDG_RUNTIME_DIR": str(long)})
    assert path.startswith(str(tmp_path / "short"))


@pytest.mark.parametrize("runtime", [None, "relative", "/nowhere/at/all"])
def test_no_runtime_directory_falls_back(runtime, path_of, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_short_directory", lambda: str(tmp_path / "short"))
    assert path_of(environ={"XDG_RUNTIME_DIR": runtime} if runtime else {}).startswith(str(tmp_path / "short"))


def test_short_directory_fits_a_socket():
    name = "depot-" + "0" * 12 + "-" + "0" * 12 + ".sock"
    assert len(os.path.join(module._short_directory(), name)) <= 107


def test_directory_that_is_not_ones_own(tmp_path, monkeypatch):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    with pytest.raises(ConfigError, match="has mode 0755, open to other users: chmod 700 it"):
        module.own_directory(str(open_to_all))

    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(ConfigError, match="not a link or file"):
        module.own_directory(str(tmp_path / "link"))

    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot make the directory"):
        module.own_directory(str(tmp_path / "file"))

    monkeypatch.setattr(os, "getuid", lambda: os.stat(target).st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        module.own_directory(str(target))
