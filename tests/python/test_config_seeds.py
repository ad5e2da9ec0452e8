"""The seeds' YAML files run unchanged: every key is honoured with its documented default and meaning."""

import dataclasses
import errno
import json
import os
import threading

import pytest

from kvdepot.config import KVDepotConfig, Machine, load_config
from kvdepot.errors import ConfigError

GIB = 1 << 30


def nfs(**values):
    return {"ucm_connectors": [{"ucm_connector_name": "UcmNfsStore", "ucm_connector_config": values}]}


def pipeline(top=None, **values):
    config = {"store_pipeline": "Cache|Posix", "storage_backends": "/mnt/test", **values}
    connector = {"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": config}
    return {"ucm_connectors": [connector], **(top or {})}


def test_pipeline_store_file(seeds, machine):
    config = load_config(seeds / "000_pipeline.yaml", machine=machine)
    assert json.loads(config.to_core_json(machine=machine)) == {
        "pipeline": "Cache|Posix",
        "pool_bytes": 256 * GIB,
        "eviction": "lhd",
        "waiting_queue_depth": 8192,
        "running_queue_depth": 524_288,
        "timeout_ms": 30_000,
        "drain_timeout_ms": 30_000,
        "pool_keep_ms": 0,
        "evicted_blocks_remembered": 262_144,
        "metrics_host": "127.0.0.1",
        "pool_mlock": False,
        "pool_numa": "auto",
        "pool_populate_threads": 0,
        "posix": {
            "directories": ["/mnt/test"],
            "create": False,
            "io_direct": False,
            "engine": "psync",
            "capacity_bytes": 1600 * GIB,
            "free_floor_percent": 2,
            "shard_directories": True,
            "read_threads": 8,
            "write_threads": 4,
            "durable": False,
            "shared": True,
            "capacity_shared": False,
            "compression": False,
        },
    }
    assert config.use_layerwise
    assert config.enable_event_sync
    assert config.share_depot
    assert config.hit_ratio is None
    assert config.persist_token_threshold == 0


def test_core_json_keeps_its_order(seeds, machine):
    text = load_config(seeds / "000_pipeline.yaml", machine=machine).to_core_json(machine=machine)
    assert text.startswith('{"pipeline":"Cache|Posix","pool_bytes":274877906944,"eviction":"lhd",')


def test_documented_pool_is_cut_to_half_of_a_small_machine(seeds, small_machine):
    config = load_config(seeds / "000_pipeline.yaml", machine=small_machine)
    assert config.pool_bytes(machine=small_machine) == 8 * GIB


def test_gdr_file_asks_for_gdr(seeds, machine):
    config = load_config(seeds / "001_gdr.yaml", machine=machine)
    assert config.use_gdr is True
    assert json.loads(config.copy_json(cuda_device=1))["use_gdr"] == "yes"


def test_gdr_file_without_gdr_has_a_pool_of_its_own(seeds, machine, tmp_path):
    file = tmp_path / "ucm.yaml"
    file.write_text((seeds / "001_gdr.yaml").read_text().replace("use_gdr: true", "use_gdr: false"))
    config = load_config(file, machine=machine)
    assert config.share_depot is False
    assert config.use_gdr is False
    assert config.pool_bytes(machine=machine) == 1 * GIB


def test_nfs_store_file(seeds, machine):
    config = load_config(seeds / "003_nfs.yaml", machine=machine)
    ours = {"pipeline": "Staging|Posix", "directories": ["/mnt/test"], "io_direct": False, "use_layerwise": True}
    assert config == load_config(ours)
    core = json.loads(config.to_core_json(block_bytes=1 << 20, machine=machine))
    assert core["pipeline"] == "Staging|Posix"
    assert core["pool_bytes"] == 4096 << 20
    assert core["timeout_ms"] == 30_000
    assert core["posix"]["read_threads"] == 8
    assert core["posix"]["write_threads"] == 4
    assert core["posix"]["shard_directories"] is True


def test_nfs_store_keys(machine):
    said = nfs(storage_backends="/a:/b", stream_number=5, buffer_number=10, timeout_ms=7, shard_data_dir=False)
    config = load_config(said, machine=machine)
    core = json.loads(config.to_core_json(block_bytes=5000, machine=machine))
    assert core["pool_bytes"] == 10 * 8192
    assert core["timeout_ms"] == 7
    assert core["posix"] == {
        "directories": ["/a", "/b"],
        "create": False,
        "io_direct": False,
        "engine": "psync",
        "capacity_bytes": 1600 * GIB,
        "free_floor_percent": 2,
        "shard_directories": False,
        "read_threads": 5,
        "write_threads": 3,
        "durable": False,
        "shared": True,
        "capacity_shared": False,
        "compression": False,
    }


def test_pool_sized_in_blocks_needs_the_block(seeds, machine):
    config = load_config(seeds / "003_nfs.yaml", machine=machine)
    with pytest.raises(ConfigError, match="write pool_gb"):
        config.to_core_json(machine=machine)


@pytest.mark.parametrize(
    ("seed", "value", "ours", "meant"),
    [
        ("io_direct", True, "io_direct", True),
        ("cache_buffer_capacity_gb", 64, "pool_gb", 64),
        ("posix_capacity_gb", 1024, "posix_capacity_gb", 1024),
        ("posix_io_engine", "psync", "io_engine", "psync"),
        ("posix_io_engine", "aio", "io_engine", "aio"),
        ("posix_io_engine", "aio", "io_direct", True),
        ("waiting_queue_depth", 16, "waiting_queue_depth", 16),
        ("running_queue_depth", 32, "running_queue_depth", 32),
        ("timeout_ms", 1000, "timeout_ms", 1000),
        ("share_buffer_enable", False, "share_depot", False),
        ("use_gdr", False, "use_gdr", False),
        ("storage_backends", "/a:/b", "directories", ("/a", "/b")),
    ],
)
def test_pipeline_store_keys(seed, value, ours, meant, machine):
    config = load_config(pipeline(**{seed: value}), machine=machine)
    assert getattr(config, ours) == meant


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_event_sync", False),
        ("use_layerwise", False),
        ("hit_ratio", 0.5),
        ("hit_ratio", 1),
        ("enable_record_traces", False),
        ("enable_record_traces", True),
        ("use_lite", False),
        ("use_lite", True),
        ("persist_token_threshold", 100),
        ("metrics_config_path", ""),
        ("metrics_config_path", "/workspace/metrics_configs.yaml"),
        ("metrics_config_path", None),
    ],
)
def test_top_level_keys(name, value, machine):
    assert getattr(load_config(pipeline({name: value}), machine=machine), name) == value


def test_files_in_this_spelling_keep_their_default_of_layers(machine):
    assert load_config(pipeline(), machine=machine).use_layerwise is True
    assert load_config({}, machine=machine).use_layerwise == "auto"


@pytest.mark.parametrize("tier", ["Cache|Posix", "Staging|Posix"])
def test_both_spellings_make_one_configuration(tier, machine):
    flat = {"pipeline": tier, "directories": "/a:/b", "io_direct": False, "timeout_ms": 5, "hit_ratio": 0.5}
    flat["use_layerwise"] = True
    ours = load_config(flat, machine=machine)
    theirs = pipeline({"hit_ratio": 0.5}, store_pipeline=tier, storage_backends="/a:/b", timeout_ms=5)
    assert load_config(theirs, machine=machine) == ours
    assert hash(load_config(theirs, machine=machine)) == hash(ours)


def test_known_module_path_is_accepted(machine):
    said = pipeline()
    said["ucm_connectors"][0]["ucm_connector_module_path"] = "ucm.store.pipeline.connector"
    assert load_config(said, machine=machine).pipeline == "Cache|Posix"


def test_every_seed_key_has_one_home():
    named = [seed for key in KVDepotConfig.key_table() for seed in key.facts.seeds]
    assert len(named) == len(set(named))


def test_nothing_at_all_is_sized_to_the_machine(small_machine):
    core = json.loads(load_config(machine=small_machine).to_core_json(machine=small_machine))
    assert core["pool_bytes"] == 8 * GIB
    assert core["posix"]["directories"] == ["/home/somebody/.cache/kvdepot"]
    assert core["posix"]["capacity_bytes"] == 10 * GIB


@pytest.mark.parametrize("said", [{"directories": ["/mnt/test"]}, pipeline(), nfs(storage_backends="/mnt/test")])
def test_without_a_capacity_the_cap_is_a_share_of_the_disk(said, machine):
    core = json.loads(load_config(said, machine=machine).to_core_json(block_bytes=4096, machine=machine))
    assert core["posix"]["capacity_bytes"] == 1600 * GIB


@pytest.mark.parametrize(("gb_per_day", "bytes_per_day"), [(0.5, GIB // 2), (3000, 3000 * GIB), (1e-12, 1)])
def test_a_write_budget_reaches_the_core(gb_per_day, bytes_per_day, machine):
    said = {"directories": ["/mnt/test"], "posix_write_gb_per_day": gb_per_day}
    core = json.loads(load_config(said, machine=machine).to_core_json(machine=machine))
    assert core["placement"]["Posix"]["write_bytes_per_day"] == bytes_per_day


def test_a_write_budget_of_0_is_no_limit(machine):
    said = {"directories": ["/mnt/test"], "posix_write_gb_per_day": 0}
    assert "placement" not in json.loads(load_config(said, machine=machine).to_core_json(machine=machine))


def test_a_capacity_of_0_is_no_cap(machine):
    said = {"directories": ["/mnt/test"], "posix_capacity_gb": 0, "posix_free_floor_percent": 0}
    core = json.loads(load_config(said, machine=machine).to_core_json(machine=machine))
    assert core["posix"]["capacity_bytes"] == 0
    assert core["posix"]["free_floor_percent"] == 0


def test_directories_of_one_disk_count_once(tmp_path):
    facts = os.statvfs(tmp_path)
    directories = [str(tmp_path), str(tmp_path / "not" / "there")]
    assert Machine(memory_bytes=1).disk_bytes(directories) == facts.f_blocks * facts.f_frsize


@pytest.fixture
def hanging_mount(monkeypatch):
    """A directory that never answers, as on a hard mount of an NFS server that is down."""
    released = threading.Event()

    def hanging(ask):
        def hang(path, *args, **options):
            if str(path).startswith("/mnt/hangs"):
                released.wait()
            return ask(path, *args, **options)

        return hang

    monkeypatch.setattr("kvdepot.config.machine.DISK_ANSWER_S", 0.05)
    monkeypatch.setattr(os, "stat", hanging(os.stat))
    monkeypatch.setattr(os, "statvfs", hanging(os.statvfs))
    yield "/mnt/hangs/kv"
    released.set()
    for thread in threading.enumerate():
        if thread.name == "kvdepot-disk-size":
            thread.join()


def test_a_mount_that_hangs_costs_its_engine_no_more_than_a_wait(hanging_mount, machine):
    """The engine's process decides the tier's default cap: of this disk the depot does, when it opens it."""
    machine = dataclasses.replace(machine, total_disk_bytes=None)
    config = load_config({"directories": [hanging_mount]}, machine=machine)
    core = json.loads(config.to_core_json(machine=machine))
    assert "capacity_bytes" not in core["posix"]
    assert config.socket_path(None) == load_config({"directories": [hanging_mount]}, machine=machine).socket_path(None)


def test_a_mount_that_fails_is_not_taken_for_the_disk_above_it(monkeypatch, tmp_path, machine):
    """As a soft mount of an NFS server that is down."""
    stat = os.stat

    def fail(path, *args, **options):
        if str(path).startswith(str(tmp_path / "fails")):
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", fail)
    assert dataclasses.replace(machine, total_disk_bytes=None).disk_bytes([str(tmp_path / "fails")]) is None


@pytest.mark.parametrize("spelled", ["Posix", "Staging|Posix", " Staging | Posix "])
def test_pipelines_of_one_meaning_are_equal(spelled, machine):
    assert load_config({"pipeline": spelled}, machine=machine).pipeline == "Staging|Posix"


def test_a_pipeline_without_directories_needs_none(machine):
    said = pipeline(store_pipeline="Cache|Empty")
    del said["ucm_connectors"][0]["ucm_connector_config"]["storage_backends"]
    assert "posix" not in json.loads(load_config(said, machine=machine).to_core_json(machine=machine))
